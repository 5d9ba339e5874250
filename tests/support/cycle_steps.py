"""Sleeps, wake-ups and syncs of unchanged weights, by a real trainer rank, and what they left."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from support.backup_steps import call_loader
from support.cycle_loader import CYCLE_LOADERS, LOOK_LOADER, POISON_LOADER, STRAY_LOADER
from support.cycle_models import MIXTURES_OF_EXPERTS, checkpoint_weights, make_model
from support.http_requests import generate, release, resume
from support.sglang_server import sglang_server
from support.trainer import TrainerRank, run_trainer

ALL_TAGS = ("kv_cache", "cuda_graph", "weights")
LOOK_EVERY = 10
GRAPHS_UNDER_THE_TAG = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true"}


def run_cycles(name: str, folder: Path, *, device: str, num_cycles: int) -> dict[str, Any]:
    """Serve one of `CYCLE_MODELS` and put it through all; what `memory_cycles` saw, and the log."""
    model = folder / "model"
    model.mkdir(parents=True)
    make_model(name, model)
    extra = ["--log-level", "info", "--decode-log-interval", "1"]
    if device != "cpu":
        extra += ["--mm-attention-backend", "triton_attn"]
        if name in MIXTURES_OF_EXPERTS:
            extra += ["--moe-runner-backend", "triton"]
    with sglang_server(
        model,
        folder,
        device=device,
        loaders=CYCLE_LOADERS,
        extra=tuple(extra),
        host_backup="auto",
        variables=GRAPHS_UNDER_THE_TAG if device != "cpu" else {},
    ) as server:
        [outcome] = run_trainer(
            memory_cycles,
            folder,
            server.url,
            name,
            str(folder),
            num_cycles,
            urls=[server.url],
            device=device,
        )
        assert outcome.error is None, f"{outcome.error}\n{server.log.read_text()[-4000:]}"
        assert server.process.poll() is None, "the engine died"
    return {**outcome.result, "log": server.log.read_text(errors="replace")}


def memory_cycles(
    rank: TrainerRank, url: str, name: str, folder: str, num_cycles: int
) -> dict[str, Any]:
    """Two syncs awake, one cycle with poison, `num_cycles` without.

    Returns:
        States of the engine by when they were taken, with greedy tokens and log-probabilities;
        for each cycle whether it generated the same; bytes freed by each tag; seconds.
    """
    weights = checkpoint_weights(name, Path(folder, "model"), rank.device)
    manager = rank.manager("compiled", bucket_bytes=1 << 20)
    engine = _Engine(rank, url, Path(folder))

    def sync() -> dict[str, int]:
        asyncio.run(manager.sync(iter(weights), version="unchanged"))
        counts = {key: getattr(manager.report, key) for key in ("num_replayed", "num_eager")}
        manager._report = manager._new_report()
        return counts

    seen: dict[str, Any] = {"loaded": engine.look(), "first": sync(), "second": sync()}
    seen["never slept"] = engine.look()
    engine.generate()  # kernels that are made with the first request
    expected = engine.generate()
    seen["text"] = expected
    for _ in range(2):  # the engine's own copies of its buffers find their place in the first
        seen["freed"] = {tag: engine.freed_by(tag) for tag in ALL_TAGS}
        sync()  # the release of the weights has lost them
    seen["after each tag"] = engine.look()
    seen["poisoned"] = _poisoned_cycle(engine, sync)
    seen["same after poison"] = engine.generate() == expected
    cycles = []
    free_before = engine.free_bytes()
    for cycle in range(num_cycles):
        with engine.asleep(ALL_TAGS) as seconds:
            replayed = sync()["num_replayed"]
        cycles.append(
            {
                "same": engine.generate() == expected,
                "replayed": replayed,
                "seconds": seconds,
                "state": engine.look() if (cycle + 1) % LOOK_EVERY == 0 else None,
            }
        )
    seen["cycles"] = cycles
    seen["lost_gpu_bytes"] = free_before - engine.free_bytes()
    seen["last"] = engine.look()
    engine.stray()
    seen["stray"] = engine.look()
    engine.sleep(ALL_TAGS)
    return seen


def _poisoned_cycle(engine: _Engine, sync: Callable[[], Any]) -> dict[str, Any]:
    """All that no restore brings back is NaN before the sync."""
    before = engine.look()
    with engine.asleep(ALL_TAGS):
        num_bytes = engine.poison()
        asleep = engine.look()
        counts = sync()
        synced = engine.look()
    return {
        "before": before,
        "bytes": num_bytes,
        "asleep": asleep,
        "counts": counts,
        "synced": synced,
        "awake": engine.look(),
    }


class _Engine:
    """The server, and loaders in its process."""

    def __init__(self, rank: TrainerRank, url: str, folder: Path) -> None:
        self._rank = rank
        self._url = url
        self._file = folder / "answer.json"

    def look(self) -> Any:
        return self._ask(LOOK_LOADER)

    def poison(self) -> Any:
        return self._ask(POISON_LOADER)

    def stray(self) -> Any:
        return self._ask(STRAY_LOADER)

    def generate(self) -> list[list[float]]:
        return generate(self._url)

    @contextmanager
    def asleep(self, tags: tuple[str, ...]) -> Any:
        """Release `tags`, resume the weights; at the end of the block the rest of them."""
        seconds: dict[str, float] = {}
        self._stage(seconds, "release", release, *tags)
        self._stage(seconds, "resume_weights", resume, "weights")
        yield seconds
        self._stage(seconds, "resume_rest", resume, "cuda_graph", "kv_cache")

    def sleep(self, tags: tuple[str, ...]) -> None:
        self._stage({}, "release", release, *tags)

    def freed_by(self, tag: str) -> dict[str, int]:
        """Bytes that the release of one tag gives back to the GPU, and what its reply tells."""
        before = self.free_bytes()
        text = self._stage({}, "release", release, tag)
        freed = self.free_bytes() - before
        self._stage({}, "resume", resume, tag)
        [told] = json.loads(text)["stages"][tag]["gpu_bytes"]
        return {"freed": freed, "told": told}

    def free_bytes(self) -> int:
        """Free memory of the GPU, all processes together; 0 on a CPU."""
        if self._rank.device.type == "cpu":
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def _stage(
        self,
        seconds: dict[str, float],
        name: str,
        stage: Callable[..., tuple[int, str]],
        *tags: str,
    ) -> str:
        started = time.perf_counter()
        status, text = stage(self._url, *tags)
        seconds[name] = time.perf_counter() - started
        assert status == 200, text
        return text

    def _ask(self, loader: str) -> Any:
        call_loader(self._rank, loader, {"path": str(self._file)})
        return json.loads(self._file.read_text())
