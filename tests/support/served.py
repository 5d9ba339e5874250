"""A served tiny model, and trainers for it: what most end-to-end tests start with."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tiny_assets import make_assets

from support.engine_loaders import HASH_LOADER
from support.sglang_server import Server, sglang_server
from support.trainer import CPU, Hashes, Ranks, TrainerRank, read_hashes, run_loader
from verl_sglang_sync.engine.server_client import operations
from verl_sglang_sync.engine.server_client.client import SGLangServerClient


@dataclass(frozen=True)
class Served:
    """The server of the checkpoint `folder/model`; `access`: its keys."""

    server: Server
    folder: Path
    tp: int
    access: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def lives(self) -> bool:
        return self.server.process.poll() is None

    @property
    def log(self) -> str:
        return self.server.log.read_text(errors="replace")

    @property
    def version(self) -> str:
        """That the engine publishes."""
        client = SGLangServerClient(self.url, timeout_s=60, **self.access)
        version: str = client.run(operations.model_info())["weight_version"]
        return version

    @property
    def schedulers(self) -> list[int]:
        """The engine's processes that load weights and compute, one for each TP rank."""
        children = psutil.Process(self.server.process.pid).children(recursive=True)
        found = [child.pid for child in children if "scheduler" in " ".join(child.cmdline())]
        assert len(found) == self.tp, [child.cmdline() for child in children]
        return found

    def ask(self, loader: str, argument: str = "", limit_s: float = 60) -> None:
        """Run one of the tests' loaders (`engine_loaders`, `memory_loaders`) on every TP rank."""
        client = SGLangServerClient(self.url, timeout_s=limit_s, **self.access)
        run_loader(client, self.tp, loader, argument)

    def hashes(self, limit_s: float = 60) -> Hashes:
        """Of the engine's own tensors, taken in its processes, by TP rank."""
        folder = self.server.log.parent
        for file in folder.glob("rank*.json"):
            file.unlink()
        self.ask(HASH_LOADER, str(folder), limit_s)
        return read_hashes(folder, self.tp)

    def trainer(self, device: Any = CPU) -> TrainerRank:
        """A trainer of one rank, in this process."""
        return TrainerRank([self.url], self.tp, device, self.folder).start()

    def ranks(self, **more: Any) -> Ranks:
        """New trainer processes, one for each TP rank; arguments as for `Ranks`."""
        return Ranks(self.folder, [self.url], tp=self.tp, **more)


@contextmanager
def served(
    folder: Path,
    *,
    tp: int = 1,
    model: Path | None = None,
    access: Mapping[str, str] | None = None,
    architecture: str = "qwen3",
    tied: bool = False,
    **more: Any,
) -> Iterator[Served]:
    """Serve a tiny model of random weights until the block ends.

    Args:
        folder: gets the log, and the model where there is none.
        tp: ranks of the engine.
        model: the checkpoint, if it is not `folder/model`.
        access: keys of the server.
        architecture: of a model that is made; likewise `tied`.
        more: arguments of `sglang_server`.
    """
    folder.mkdir(exist_ok=True)
    if model is None and not (folder / "model").exists():
        make_assets(folder, architecture=architecture, tied=tied)
    with sglang_server(model or folder / "model", folder, tp=tp, **more) as server:
        yield Served(server, folder if model is None else model.parent, tp, access or {})
