"""Negative control: verl imports this module (VERL_USE_EXTERNAL_MODULES) and loses one sync.

The third sync of the run, or the third of its adapter, is exported and drained but never reaches
the engine, which then samples from stale weights; the proof of arrival must notice.
"""

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from verl_sglang_sync.sync.adapter_sync import AdapterSync
from verl_sglang_sync.sync.sharding_manager import SGLangShardingManager

DROPPED = 3


def _but_one(sync: Callable[..., Any], drain: Callable[[Any], object]) -> Callable[..., Any]:
    numbers = itertools.count(1)

    async def sync_but_one(self: Any, source: Any, *args: Any, **kwargs: Any) -> None:
        if next(numbers) != DROPPED:
            await sync(self, source, *args, **kwargs)
            return
        drain(source)
        if isinstance(self, SGLangShardingManager):
            self.report.weight_version = kwargs["version"]

    return sync_but_one


SGLangShardingManager.sync = _but_one(  # type: ignore[method-assign]
    SGLangShardingManager.sync, lambda weights: deque(weights, maxlen=0)
)
AdapterSync.sync = _but_one(  # type: ignore[method-assign]
    AdapterSync.sync, lambda collect: collect()
)
