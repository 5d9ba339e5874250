"""A served tiny model, and trainers for it: what most end-to-end tests start with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tiny_assets import make_assets

from support.http_requests import get
from support.sglang_server import Server, sglang_server
from support.trainer import CPU, LoneTrainer, Outcome, Step, results_of, run_trainer


@dataclass(frozen=True)
class Served:
    """The server of the checkpoint `folder/model`."""

    server: Server
    folder: Path
    tp: int

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def lives(self) -> bool:
        return self.server.process.poll() is None

    @property
    def version(self) -> str:
        """That the engine publishes."""
        status, text = get(self.url, "model_info")
        assert status == 200, text
        version: str = json.loads(text)["weight_version"]
        return version

    @property
    def schedulers(self) -> list[int]:
        """The engine's processes that load weights and compute, one for each TP rank."""
        children = psutil.Process(self.server.process.pid).children(recursive=True)
        found = [child.pid for child in children if "scheduler" in " ".join(child.cmdline())]
        assert len(found) == self.tp, [child.cmdline() for child in children]
        return found

    def trainer(self) -> LoneTrainer:
        return LoneTrainer(self.url, CPU, self.folder)

    def attempt(self, step: Step, *args: Any, url: str | None = None, **more: Any) -> list[Outcome]:
        """Run a step on new trainer processes, one for each TP rank; by rank, how it ended."""
        return run_trainer(step, self.folder, *args, urls=[url or self.url], tp=self.tp, **more)

    def run(self, step: Step, *args: Any, **more: Any) -> list[Any]:
        """The same where no rank may fail: results by rank."""
        return results_of(self.attempt(step, *args, **more))


@contextmanager
def served(
    folder: Path, *, tp: int = 1, architecture: str = "qwen3", tied: bool = False, **more: Any
) -> Iterator[Served]:
    """Serve a tiny model of random weights until the block ends; arguments as `sglang_server`'s."""
    if not (folder / "model").exists():
        make_assets(folder, architecture=architecture, tied=tied)
    with sglang_server(folder / "model", folder, tp=tp, **more) as server:
        yield Served(server, folder, tp)
