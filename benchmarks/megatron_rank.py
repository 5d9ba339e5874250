"""A trainer rank of `megatron_sync`: exports with its bridge and syncs, arm after arm."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from support.megatron_trainer import Layout, MegatronActor
from support.trainer import TrainerRank
from verl_sglang_sync.bench.arms import counts_of

NUM_WARM_UPS = 4  # compiled: a plan, and then a route for it, are each made and proven in a sync
EXPORT_ONLY = "export_only"
STAGES = ("confirm", "export", "gather", "pack", "load")


@dataclass(frozen=True)
class Arm:
    """One way to sync.

    Attributes:
        mode: preset.
        bucket_bytes: 1 makes a bucket, and a request, of every tensor; None: the benchmark's.
    """

    mode: str
    bucket_bytes: int | None = None


ARMS = {
    "per_tensor": Arm("bucketed", bucket_bytes=1),
    "bucketed": Arm("bucketed"),
    "flattened": Arm("flattened"),
    "compiled": Arm("compiled"),
}


def measure_rank(
    rank: TrainerRank, model: str, layout: dict[str, int], names: list[str], runs: int, bucket: int
) -> dict[str, Any]:
    """Seconds of every run of every arm on this rank, and what was sent."""
    actor = MegatronActor(Path(model), msgspec.convert(layout, Layout), random=True)
    return {name: _measure(rank, actor, name, runs, bucket) for name in names}


def _measure(
    rank: TrainerRank, actor: MegatronActor, name: str, runs: int, bucket: int
) -> dict[str, Any]:
    run = _exporting(actor) if name == EXPORT_ONLY else _syncing(rank, actor, ARMS[name], bucket)
    measured: list[dict[str, float]] = []
    for _ in range(NUM_WARM_UPS + runs):
        dist.barrier()
        notes = run()
        measured.append(notes.pop("seconds"))
    runs_s = measured[NUM_WARM_UPS:]
    seconds = sorted(each["sync"] for each in runs_s)
    print(f"{name}: {seconds} s", flush=True)  # in the log, should a later arm be cut off
    return {"runs_s": runs_s, **notes}


def _exporting(actor: MegatronActor) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        started = time.perf_counter()
        num_tensors = num_bytes = 0
        for _, tensor in actor.export():
            num_tensors += 1
            num_bytes += tensor.nbytes
        _synchronize()
        seconds = time.perf_counter() - started
        return {
            "seconds": {"sync": seconds, "export": seconds},
            "num_tensors": num_tensors,
            "bytes": num_bytes,
        }

    return run


def _syncing(
    rank: TrainerRank, actor: MegatronActor, arm: Arm, bucket: int
) -> Callable[[], dict[str, Any]]:
    manager = rank.manager(arm.mode, bucket_bytes=arm.bucket_bytes or bucket, timeout_s=600)

    def run() -> dict[str, Any]:
        started = time.perf_counter()
        asyncio.run(manager.sync(actor.export(), version="0"))
        _synchronize()
        seconds = {"sync": time.perf_counter() - started}
        report = manager.report
        seconds |= {stage: report.seconds.get(stage, 0.0) for stage in STAGES}
        notes = {
            "seconds": seconds,
            "num_tensors": report.num_tensors,
            "bytes": report.payload_bytes,
            **counts_of(report),
        }
        asyncio.run(manager.resume(("kv_cache",)))  # resident already: closes the report
        return notes

    return run


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
