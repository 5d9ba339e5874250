"""Manifests that do not fit, sent by real trainer ranks to a real engine; in all modes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from support.trainer import NamedTensors, TrainerRank, engine_hashes

MODES = ("bucketed", "flattened", "compiled")
DOUBLED = "model.norm.weight"
LOST = "model.layers.0.self_attn.k_proj.weight"
STRANGE = "model.layers.0.self_attn.of_another_model.weight"


def manifest_faults(rank: TrainerRank, good: NamedTensors, folder: Path) -> dict[str, Any]:
    """By mode: three faults at once, a good sync, a sync that differs from it, a good one."""
    seen: dict[str, Any] = {}
    bad = _with_three_faults(good)
    for mode in MODES:
        manager = rank.manager(mode)
        before = engine_hashes(rank, folder)
        refused = sync_error(manager, bad)
        untouched = engine_hashes(rank, folder) == before
        first = sync_error(manager, good)
        was_asked = "manifest" in manager.report.seconds
        manager.report.seconds.clear()
        second = sync_error(manager, good)
        seen[mode] = {
            "refused": refused,
            "untouched": untouched,
            "good": [first, second],
            "asked": [was_asked, "manifest" in manager.report.seconds],
            "changed": sync_error(manager, good[:-1]),
            "after": sync_error(manager, good),
            "hashes": engine_hashes(rank, folder),
            "one shot": sync_error(rank.manager(mode), iter(bad)),
            "one shot, good": sync_error(rank.manager(mode), iter(good)),
        }
    warned = rank.manager("flattened", manifest_check="warn")
    seen["warned"] = sync_error(warned, _without(good, LOST))
    assert sync_error(warned, good) is None
    return seen


def sync_error(manager: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """One sync; the error that it raised."""
    from verl_sglang_sync.weight_sync import WeightSyncError

    try:
        asyncio.run(manager.sync(weights, version="manifest"))
    except WeightSyncError as error:
        return str(error)
    return None


def _with_three_faults(good: NamedTensors) -> NamedTensors:
    strange = (STRANGE, torch.ones(4, 4, device=good[0][1].device))
    doubled = [(n, torch.cat([t, t]) if n == DOUBLED else t) for n, t in _without(good, LOST)]
    return [*doubled, strange]


def _without(weights: NamedTensors, lost: str) -> NamedTensors:
    return [(name, tensor) for name, tensor in weights if name != lost]
