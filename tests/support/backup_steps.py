"""What the trainer rank of the host backup's GPU tests does between the stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from support.coverage_loader import POISON_LOADER, PUBLISH_LOADER, STATE_LOADER
from support.trainer import TrainerRank
from verl_sglang_sync.engine.server_client import operations


def call_loader(rank: TrainerRank, loader: str, argument: dict[str, Any]) -> None:
    """Run one of the test's loaders in the engine, with `argument`."""
    from support.ipc import serialize_handles

    # One tensor for each TP rank, kept until the reply: the first to open a handle consumes it.
    tensors = [torch.zeros(1, device=rank.device) for _ in range(rank.tp)]
    handles = [serialize_handles([(json.dumps(argument), tensor)]) for tensor in tensors]
    rank.client.run(operations.update_weights(handles, load_format=loader))


def engine_state(rank: TrainerRank, path: str) -> dict[str, Any]:
    """Hashes and sizes, read inside the engine."""
    call_loader(rank, STATE_LOADER, {"path": path})
    state: dict[str, Any] = json.loads(Path(path).read_text())
    return state


def publish(rank: TrainerRank, uncovered: list[str]) -> None:
    """Have the engine believe that syncs write all parameters but `uncovered`."""
    call_loader(rank, PUBLISH_LOADER, {"uncovered": uncovered})


def poison(rank: TrainerRank, uncovered: list[str]) -> None:
    """Have the engine overwrite what `publish` called covered."""
    call_loader(rank, POISON_LOADER, {"uncovered": uncovered})


def occupy(rank: TrainerRank, url: str, leave_bytes: int) -> list[Any]:
    """Take the GPU's memory but for `leave_bytes` and try to resume the weights."""
    from support.http_requests import resume

    free = torch.cuda.mem_get_info()[0]
    taken = torch.empty(max(free - leave_bytes, 0), dtype=torch.uint8, device=rank.device)
    reply = resume(url, "weights")
    del taken
    torch.cuda.empty_cache()
    return list(reply)
