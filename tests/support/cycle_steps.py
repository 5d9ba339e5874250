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

from support.cycle_models import MIXTURES_OF_EXPERTS, checkpoint_weights, make_model
from support.http_requests import Reply, generate, release, resume
from support.memory_loaders import LOOK_LOADER, MEMORY_LOADERS, POISON_LOADER, STRAY_LOADER
from support.served import served
from support.trainer import TrainerRank, ask_engine

ALL_TAGS = ("kv_cache", "cuda_graph", "weights")
LOOK_EVERY = 10
GRAPHS_UNDER_THE_TAG = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true"}


def run_cycles(name: str, folder: Path, *, device: str, num_cycles: int) -> dict[str, Any]:
    """Serve one of `CYCLE_MODELS` and put it through all; what `memory_cycles` saw, and the log."""
    (folder / "model").mkdir(parents=True)
    make_model(name, folder / "model")
    extra, on_gpu = ["--log-level", "info", "--decode-log-interval", "1"], device != "cpu"
    if on_gpu:
        extra += ["--mm-attention-backend", "triton_attn"]
        if name in MIXTURES_OF_EXPERTS:
            extra += ["--moe-runner-backend", "triton"]
    with served(
        folder,
        device=device,
        loaders=MEMORY_LOADERS,
        extra=tuple(extra),
        host_backup="auto",
        variables=GRAPHS_UNDER_THE_TAG if on_gpu else {},
    ) as engine:
        [outcome] = engine.attempt(memory_cycles, name, num_cycles, device=device)
        log = engine.server.log.read_text(errors="replace")
        assert outcome.error is None, f"{outcome.error}\n{log[-4000:]}"
        assert engine.lives, "the engine died"
    return {**outcome.result, "log": log}


def memory_cycles(rank: TrainerRank, name: str, num_cycles: int) -> dict[str, Any]:
    """Two syncs awake, one cycle with poison, `num_cycles` without.

    Returns:
        States of the engine by when they were taken, with greedy tokens and log-probabilities;
        for each cycle whether it generated the same; bytes freed by each tag; seconds.
    """
    weights = checkpoint_weights(name, rank.folder / "model", rank.device)
    manager = rank.manager("compiled", bucket_bytes=1 << 20)
    engine = _Engine(rank)

    def sync() -> dict[str, int]:
        asyncio.run(manager.sync(iter(weights), version="unchanged"))
        counts = {key: getattr(manager.report, key) for key in ("num_replayed", "num_eager")}
        manager.report = manager._new_report()
        return counts

    seen: dict[str, Any] = {"loaded": engine.look(), "first": sync(), "second": sync()}
    seen["never slept"] = engine.look()
    engine.generate()  # kernels that are made with the first request
    expected = engine.generate()
    for _ in range(2):  # the engine's own copies of its buffers find their place in the first
        seen["freed"] = {tag: engine.freed_by(tag) for tag in ALL_TAGS}
        sync()  # the release of the weights has lost them
    seen["after each tag"] = engine.look()
    seen["poisoned"] = _poisoned_cycle(engine, sync)
    seen["same after poison"] = engine.generate() == expected
    cycles = seen["cycles"] = []
    free_before = engine.free_bytes()
    for cycle in range(num_cycles):
        with engine.asleep() as seconds:
            replayed = sync()["num_replayed"]
        same = engine.generate() == expected
        state = engine.look() if (cycle + 1) % LOOK_EVERY == 0 else None
        cycles.append({"same": same, "replayed": replayed, "seconds": seconds, "state": state})
    seen["lost_gpu_bytes"] = free_before - engine.free_bytes()
    seen["last"] = engine.look()
    engine.ask(STRAY_LOADER)
    seen["stray"] = engine.look()
    engine.stage(release, *ALL_TAGS)
    return seen


def _poisoned_cycle(engine: _Engine, sync: Callable[[], Any]) -> dict[str, Any]:
    """All that no restore brings back is NaN before the sync."""
    seen = {"before": engine.look()}
    with engine.asleep():
        seen["bytes"] = engine.ask(POISON_LOADER)
        seen["asleep"] = engine.look()
        seen["counts"] = sync()
        seen["synced"] = engine.look()
    return {**seen, "awake": engine.look()}


class _Engine:
    """The server, and loaders in its process."""

    def __init__(self, rank: TrainerRank) -> None:
        self._rank = rank
        self._file = rank.folder / "answer.json"

    def ask(self, loader: str) -> Any:
        """Have the engine run one of `memory_loaders`; its answer."""
        ask_engine(self._rank, loader, json.dumps({"path": str(self._file)}))
        return json.loads(self._file.read_text())

    def look(self) -> Any:
        return self.ask(LOOK_LOADER)

    def generate(self) -> list[list[float]]:
        return generate(self._rank.url)

    @contextmanager
    def asleep(self) -> Any:
        """Release all, resume the weights; at the end of the block the rest. Yields the seconds."""
        seconds = {"release": self.stage(release, *ALL_TAGS)[1]}
        seconds["resume_weights"] = self.stage(resume, "weights")[1]
        yield seconds
        seconds["resume_rest"] = self.stage(resume, "cuda_graph", "kv_cache")[1]

    def freed_by(self, tag: str) -> dict[str, int]:
        """Bytes that the release of one tag gives back to the GPU, and what its reply tells."""
        before = self.free_bytes()
        text, _ = self.stage(release, tag)
        freed = self.free_bytes() - before
        self.stage(resume, tag)
        [told] = json.loads(text)["stages"][tag]["gpu_bytes"]
        return {"freed": freed, "told": told}

    def free_bytes(self) -> int:
        """Free memory of the GPU, all processes together; 0 on a CPU."""
        if self._rank.device.type == "cpu":
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def stage(self, stage: Callable[..., Reply], *tags: str) -> tuple[str, float]:
        """Go through a stage; its reply and its seconds."""
        started = time.perf_counter()
        status, text = stage(self._rank.url, *tags)
        seconds = time.perf_counter() - started
        assert status == 200, text
        return text, seconds
