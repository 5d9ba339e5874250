"""A preset's settings, for tests that make their own."""

from __future__ import annotations

from typing import Any

from verl_sglang_sync.config import WeightSyncConfig


def settings_of(mode: str = "flattened", **keys: Any) -> WeightSyncConfig:
    """The preset `mode` with other values for some keys, in a recipe that wakes up in stages."""
    recipe = {"bucket_bytes": 64 << 10, "multi_stage_wake_up": True, "free_cache_engine": True}
    return WeightSyncConfig(mode=mode, **{**recipe, **keys})  # type: ignore[arg-type]
