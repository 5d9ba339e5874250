"""Negative control: verl imports this module (VERL_USE_EXTERNAL_MODULES) and loses one sync.

The third sync of the run is exported and drained but never reaches the engine, which then samples
from stale weights; the proof of arrival must notice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from verl_sglang_sync.sync.sharding_manager import SGLangShardingManager

DROPPED = 3
_sync = SGLangShardingManager.sync
_numbers = itertools.count(1)


async def _sync_but_one(
    self: SGLangShardingManager, weights: Iterable[Any], *, version: str | None = None
) -> None:
    if next(_numbers) == DROPPED:
        for _ in weights:
            pass
        self.report.weight_version = version
        return
    await _sync(self, weights, version=version)


SGLangShardingManager.sync = _sync_but_one  # type: ignore[method-assign]
