"""What a trainer does with an engine of two hosts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.engine_hash import HASH_LOADER
from support.engine_steps import weights_of
from support.trainer import TrainerRank
from verl_sglang_sync.engine.server_client import operations


def sync_away_and_back(rank: TrainerRank, model: str, folder: str) -> dict[str, Any]:
    """Hashes of all TP ranks' weights: at first, after a sync of others, and of the first again."""
    seen = {"at first": _hashes(rank, Path(folder))}
    manager = rank.manager("flattened")
    for what, scale in (("halved", 0.5), ("back", 1.0)):
        weights = weights_of(Path(model), rank.device, scale=scale)
        asyncio.run(manager.sync(iter(weights), version=what))
        seen[what] = _hashes(rank, Path(folder))
    return seen


def _hashes(rank: TrainerRank, folder: Path) -> list[dict[str, str]]:
    """Each TP rank gets its tensor from the trainer rank of its host: they share no memory else."""
    from support.ipc import serialize_handles

    tensor = torch.zeros(1)
    handles: list[Any] = [None] * rank.tp
    dist.all_gather_object(handles, serialize_handles([(str(folder), tensor)]))
    if rank.is_leader:
        rank.client.run(operations.update_weights(handles, load_format=HASH_LOADER))
    dist.barrier()
    del tensor
    return [json.loads((folder / f"rank{tp}.json").read_text()) for tp in range(rank.tp)]
