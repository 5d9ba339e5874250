"""Tensors that do not fit, sent by real trainer ranks to a real engine; in all modes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from support.trainer import NamedTensors, TrainerRank, engine_hashes

MODES = ("bucketed", "flattened", "compiled")
DOUBLED = "model.norm.weight"
LOST = "model.layers.0.self_attn.k_proj.weight"
STRANGE = "model.layers.0.self_attn.of_another_model.weight"


def manifest_faults(rank: TrainerRank, good: NamedTensors, folder: Path) -> dict[str, Any]:
    """By mode: what the loader refuses, what it drops without a word, and good syncs between."""
    seen: dict[str, Any] = {}
    doubled = [(n, torch.cat([t, t]) if n == DOUBLED else t) for n, t in good]
    less = [(name, tensor) for name, tensor in good if name != LOST]
    dropped = [*less, (STRANGE, torch.ones(4, 4, device=good[0][1].device))]
    for mode in MODES:
        manager = rank.manager(mode)
        seen[mode] = {
            "good": [sync_error(manager, good)],
            "refused": sync_error(manager, doubled),
            "dropped": "\n".join(str(sync_error(manager, dropped)) for _ in range(2)),
            "one shot": sync_error(rank.manager(mode), iter(dropped)),
        }
        seen[mode]["good"] += [sync_error(manager, good), sync_error(manager, iter(good))]
        seen[mode]["less"] = sync_error(manager, less)
        seen[mode]["good"].append(sync_error(manager, good))
        seen[mode]["hashes"] = engine_hashes(rank, folder)
    warned = rank.manager("flattened", manifest_check="warn")
    with _warnings() as said:
        seen["warned"] = [sync_error(warned, less), sync_error(warned, less)]
    seen["said"] = said
    assert sync_error(warned, good) is None
    return seen


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the trainer logs of the check meanwhile."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.WARNING and "manifest check" in record.getMessage():
                said.append(record.getMessage())

    handler, logger = Handler(), logging.getLogger("verl_sglang_sync")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def sync_error(manager: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """One sync; the error that it raised."""
    from verl_sglang_sync import WeightSyncError

    try:
        asyncio.run(manager.sync(weights, version="manifest"))
    except WeightSyncError as error:
        return str(error)
    return None
