"""Probe: imports verl as a trainer process does and tells what our plugin changed in it."""

from __future__ import annotations

import os
import traceback
from importlib.metadata import entry_points
from typing import Any

import msgspec

from verl_sglang_sync.doctor.probe import write_facts


class VerlFacts(msgspec.Struct, frozen=True, kw_only=True):
    """State of a process that has imported verl.

    Attributes:
        policy: verl's `VERL_USE_EXTERNAL_PLUGINS`.
        load_error: traceback of our entry point, which verl hides; None if it loads.
        rollout_class: dotted path registered for SGLang rollouts.
        replica_class: dotted path of the class that verl's replica registry returns.
        import_error: traceback of importing these two classes.
        checks_recipes: verl's `validate_config` runs our checks first.
        bucket_megabytes: verl's default bucket size, in MiB.
    """

    policy: str
    load_error: str | None
    rollout_class: str
    replica_class: str | None
    import_error: str | None
    checks_recipes: bool
    bucket_megabytes: int


def collect() -> VerlFacts:
    """Look at this process; imports verl and, through the rollout classes, sglang."""
    load_error = None
    import verl.utils.config  # loads the entry points
    from verl.workers.config import CheckpointEngineConfig
    from verl.workers.rollout import base, replica

    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if policy.strip().lower() != "none":
        load_error = _load_error()
    replica_class, import_error = None, None
    try:
        base.get_rollout_class("sglang", "async")
        replica_class = _path(replica.RolloutReplicaRegistry.get("sglang"))
    except Exception:
        import_error = traceback.format_exc()
    validate = verl.utils.config.validate_config
    return VerlFacts(
        policy=policy,
        load_error=load_error,
        rollout_class=base._ROLLOUT_REGISTRY[("sglang", "async")],
        replica_class=replica_class,
        import_error=import_error,
        checks_recipes=validate.__module__ == "verl_sglang_sync.preflight",
        bucket_megabytes=CheckpointEngineConfig().update_weights_bucket_megabytes,
    )


def _load_error() -> str | None:
    """Load our entry point again: a module that failed to import fails in the same way."""
    for entry_point in entry_points(group="verl.plugins", name="verl_sglang_sync"):
        try:
            entry_point.load()
        except Exception:
            return traceback.format_exc()
    return None


def _path(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


if __name__ == "__main__":
    write_facts(collect())
