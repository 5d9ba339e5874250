"""What the trainer ranks of `test_expert_remap_gpu` do around a rebalancing of the experts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.cycle_models import checkpoint_weights
from support.engine_steps import sync_asleep
from support.http_requests import generate
from support.trainer import TrainerRank

REBALANCED = "[EPLBManager] rebalance end"
MODEL = "qwen3-moe"


def around_a_remap(rank: TrainerRank, folder: str, num_tokens: int) -> dict[str, Any]:
    """(the engine's hashes, the report) of syncs before and after, by what they are for.

    Args:
        rank: of the trainer.
        folder: with the model and the server's log.
        num_tokens: that many and the engine rebalances.
    """
    first = checkpoint_weights(MODEL, Path(folder, "model"), rank.device)
    second = [(name, tensor * 0.5) for name, tensor in first]
    log = Path(folder, "server.log")

    def sync(mode: str, *weights: Any) -> list[Any]:
        manager = rank.manager(mode)
        return [sync_asleep(rank, manager, named, "other", Path(folder)) for named in weights]

    seen = {"learned": sync("compiled", first, second, first)}
    if rank.is_leader:
        generate(rank.url, num_tokens)
        _wait_until(lambda: REBALANCED in log.read_text(errors="replace"))
    seen["remapped"] = sync("compiled", first, second, first)
    seen["eager"] = sync("flattened", second, first)
    return seen


def _wait_until(holds: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("the engine did not rebalance its experts")
        time.sleep(0.2)
