"""A trainer rank of `colocated --gpus N`: an FSDP2 model, exported as verl does, and synced."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.trainer import TrainerRank
from verl_sglang_sync.bench.arms import (
    BUCKET_BYTES,
    counts_of,
    native_engine,
    native_sync,
    seconds_of,
    synchronize,
)
from verl_sglang_sync.bench.trainers import NamedTensor, ShardedModel

NUM_WARM_UPS = 5  # ours: a plan, an arrangement, an exchange are each learned and proven in a sync
PRESETS = ("bucketed", "flattened", "compiled")
GATHERED = "compiled_gathered"
LIMITS = ("export_only", "all_gather_limit", "all_to_all_limit")


def measure_rank(
    rank: TrainerRank, model: str, config: str, arms: list[str], runs: int, lines: str
) -> None:
    """Measure every arm; rank 0 appends what it saw to `lines`, one arm after the other."""
    if rank.device.type == "cpu":
        from verl_sglang_sync.verl.cpu_platform import _share_tensors_by_name

        _share_tensors_by_name()  # for `native`
    sharded = ShardedModel(model, rank.device)
    for arm in arms:
        warm_ups = NUM_WARM_UPS if arm in (*PRESETS, GATHERED) else 1
        print(arm, flush=True)
        seen = _measure(_step(arm, rank, sharded, config), rank, warm_ups, runs)
        if rank.rank == 0:
            with Path(lines).open("a") as file:
                file.write(json.dumps({"arm": arm, **seen}) + "\n")


def _measure(
    step: Callable[[], dict[str, Any]], rank: TrainerRank, warm_ups: int, runs: int
) -> dict[str, Any]:
    measured: list[dict[str, float]] = []
    notes: dict[str, Any] = {}
    for i in range(warm_ups + runs):
        if i == warm_ups and rank.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        synchronize(rank.device)
        started = time.perf_counter()
        notes = step()
        synchronize(rank.device)
        seconds = {"sync": time.perf_counter() - started}
        notes.pop("close", lambda: None)()
        print(f"step {i}: {seconds['sync']:.4f} s", flush=True)
        measured.append(seconds | {f"sync_{k}": v for k, v in notes.pop("seconds", {}).items()})
    if rank.device.type == "cuda":
        notes["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
    warm_up_s = [seconds["sync"] for seconds in measured[:warm_ups]]
    return {"warm_up_s": warm_up_s, "runs_s": measured[warm_ups:], **notes}


def _step(
    arm: str, rank: TrainerRank, sharded: ShardedModel, config: str
) -> Callable[[], dict[str, Any]]:
    if arm == "native":
        return _native(rank, sharded, config)
    if arm in PRESETS:
        return _ours(arm, rank, sharded)
    if arm == GATHERED:
        return _ours("compiled", rank, sharded, exchange_shards=False)
    if arm == "export_only":
        return lambda: _drain(sharded.export())
    return _collective(arm, rank, sum(shard.nbytes for _, shard in sharded.shards()))


def _ours(
    mode: str, rank: TrainerRank, sharded: ShardedModel, **settings: Any
) -> Callable[[], dict[str, Any]]:
    manager = rank.manager(mode, bucket_bytes=BUCKET_BYTES, timeout_s=600, **settings)

    def run() -> dict[str, Any]:
        asyncio.run(manager.sync(sharded.reexport(), version="0"))
        report = manager.report
        return {
            # resident already, and no part of the sync
            "close": lambda: asyncio.run(manager.resume(("kv_cache",))),
            "seconds": seconds_of(report),
            "num_tensors": report.num_tensors,
            "bytes": report.payload_bytes,
            **counts_of(report),
        }

    return run


def _native(rank: TrainerRank, sharded: ShardedModel, config: str) -> Callable[[], dict[str, Any]]:
    engine = native_engine(rank.url, config) if rank.is_leader else None

    def run() -> dict[str, Any]:
        asyncio.run(native_sync(engine, rank.mesh, sharded.export()))
        dist.barrier()
        return {}

    return run


def _drain(export: Iterable[NamedTensor]) -> dict[str, Any]:
    num_tensors = num_bytes = 0
    for _, tensor in export:
        num_tensors += 1
        num_bytes += tensor.nbytes
    return {"num_tensors": num_tensors, "bytes": num_bytes}


def _collective(arm: str, rank: TrainerRank, nbytes: int) -> Callable[[], dict[str, Any]]:
    """The bare collective that any sync needs: every byte to every rank, or each rank its part."""
    world = dist.get_world_size()
    chunk = min(nbytes, BUCKET_BYTES // world) // world * world
    rounds = -(-nbytes // chunk)
    local = torch.empty(chunk, dtype=torch.uint8, device=rank.device)
    all_of_it = torch.empty(chunk * world, dtype=torch.uint8, device=rank.device)

    def run() -> dict[str, Any]:
        for _ in range(rounds):
            if arm == "all_gather_limit":
                dist.all_gather_into_tensor(all_of_it, local)
            else:
                dist.all_to_all_single(all_of_it[:chunk], local)
        return {"bytes": rounds * chunk * world}

    return run
