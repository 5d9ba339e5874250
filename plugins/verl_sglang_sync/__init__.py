"""Fast weight sync and staged wake-up for verl with SGLang rollouts, switched on by Hydra flags.

The names in `__all__` are public. All other names may change from release to release.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_sglang_sync.config import WeightSyncConfig
    from verl_sglang_sync.report import SyncReport
    from verl_sglang_sync.sync.sharding_manager import SGLangShardingManager
    from verl_sglang_sync.trainer_ranks import WeightSyncError

__version__ = "0.1.0"

__all__ = ["SGLangShardingManager", "SyncReport", "WeightSyncConfig", "WeightSyncError"]

_MODULES = {
    "SGLangShardingManager": "sync.sharding_manager",
    "SyncReport": "report",
    "WeightSyncConfig": "config",
    "WeightSyncError": "trainer_ranks",
}


# Import at the first use: verl loads this package in each of its processes.
def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
