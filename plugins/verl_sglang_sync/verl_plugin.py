"""Entry point `verl.plugins`: verl imports this module in every process that imports verl."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

ROLLOUT_CLASS = "verl_sglang_sync.verl.rollout.WeightSyncRollout"


def register() -> None:
    """Put our classes into verl's registries. Without a preset they behave as verl's own."""
    import verl.utils.config
    from verl.workers.rollout import base, replica

    from verl_sglang_sync.preflight import with_recipe_check
    from verl_sglang_sync.verl import checkpoint_engine  # noqa: F401  registers its backend

    base._ROLLOUT_REGISTRY[("sglang", "async")] = ROLLOUT_CLASS
    verls_loader = replica.RolloutReplicaRegistry._registry["sglang"]

    def load_replica() -> type[Any]:
        verls_loader()  # verl's loader prepares the process for SGLang
        from verl_sglang_sync.verl.replica import WeightSyncReplica

        return WeightSyncReplica

    replica.RolloutReplicaRegistry.register("sglang", load_replica)
    verl.utils.config.validate_config = with_recipe_check(verl.utils.config.validate_config)


try:
    register()
except Exception:
    # verl logs a plugin's import error at DEBUG and goes on without the plugin. A user would train
    # without the weight sync that the recipe names.
    logger.exception("verl-sglang-sync failed to load, so +weight_sync=... would have no effect")
    raise
