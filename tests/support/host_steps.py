"""What a trainer does with an engine of two hosts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from support.engine_steps import engine_hashes, weights_of
from support.trainer import TrainerRank


def sync_away_and_back(rank: TrainerRank, model: str, folder: str) -> dict[str, Any]:
    """Hashes of all TP ranks' weights: at first, after a sync of others, and of the first again."""
    seen = {"at first": engine_hashes(rank, Path(folder))}
    manager = rank.manager("flattened")
    for what, scale in (("halved", 0.5), ("back", 1.0)):
        weights = weights_of(Path(model), rank.device, scale=scale)
        asyncio.run(manager.sync(iter(weights), version=what))
        seen[what] = engine_hashes(rank, Path(folder))
    return seen
