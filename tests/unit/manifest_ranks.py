"""What each of the pool's ranks does in a test of the manifest check: one sync, and what it saw."""

import asyncio
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sglang_loader.manifest_verdict import ManifestVerdict
from unit.trainer_ranks import WORLD_SIZE, RecordingEngine, full_tensor, name_of, trainer_group

NUM_TENSORS = 6


@dataclass(frozen=True, kw_only=True)
class ManifestCase:
    """One sync to two replicas of two ranks.

    Attributes:
        refused_by: leader's rank whose engine finds a tensor missing; None: nobody.
        dies_on: rank whose export raises while the manifest is made.
        num_tensors_on: ranks that export another number of tensors.
        level: the setting.
    """

    refused_by: int | None = None
    dies_on: int | None = None
    num_tensors_on: tuple[tuple[int, int], ...] = ()
    level: str = "error"


def manifest_sync(case):
    """Two syncs; returns (what the engine was asked, errors, exports started) of this rank."""
    from verl_sglang_sync.config import WeightSyncConfig
    from verl_sglang_sync.reexport import Reexport
    from verl_sglang_sync.sharding_manager import SGLangShardingManager
    from verl_sglang_sync.weight_sync import WeightSyncError

    group, is_leader = trainer_group(2)
    rank, events, started = dist.get_rank(), [], []

    def export():
        started.append(rank)
        for i in range(dict(case.num_tensors_on).get(rank, NUM_TENSORS)):
            if case.dies_on == rank and i == 2:
                raise RuntimeError("the export broke")
            tensor = full_tensor(0, i)
            if case.dies_on is None and not case.num_tensors_on:  # as FSDP's export does
                shards = [torch.empty_like(shard) for shard in tensor.chunk(WORLD_SIZE)]
                dist.all_gather(shards, tensor.chunk(WORLD_SIZE)[rank].contiguous())
                tensor = torch.cat(shards)
            yield name_of(i), tensor

    engine = RecordingEngine(events)
    if case.refused_by == rank:
        engine.verdict = ManifestVerdict(missing=("model.norm.weight",), unexpected=("x", "y"))
    manager = SGLangShardingManager(
        engine=engine if is_leader else None,
        settings=WeightSyncConfig(
            mode="flattened",
            bucket_bytes=4 * 256,
            multi_stage_wake_up=True,
            free_cache_engine=False,
            manifest_check=case.level,
        ),
        group=group,
        device=torch.device("cpu"),
        replica=rank // 2,
    )
    errors = []
    for _ in range(2):
        try:
            asyncio.run(manager.sync(Reexport(export)))
            errors.append(None)
        except WeightSyncError as error:
            errors.append(str(error))
    return [event[0] for event in events], errors, len(started)
