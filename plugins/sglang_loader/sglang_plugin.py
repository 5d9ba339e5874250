"""Entry point `sglang.srt.plugins`: hooks SGLang's weight updater, in every SGLang process.

The hooks do nothing unless the server was launched with our loaders (they stand in
`ServerArgs.custom_weight_loader`), as our replica does where a `+weight_sync` preset was chosen.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def activate() -> None:
    """Register the hooks; SGLang applies them once all plugins are loaded.

    Raises:
        Exception: whatever went wrong, after logging it: a plugin that is not there must be loud.
    """
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from sglang_loader import weight_updater_hooks as hooks

        for method, hook in (
            ("update_weights_from_tensor", hooks.update_on_all_ranks),
            ("release_memory_occupation", hooks.release_resident_tags),
            ("resume_memory_occupation", hooks.resume_released_tags),
        ):
            HookRegistry.register(f"{_UPDATER}.{method}", hook, HookType.AROUND)
    except Exception:
        logger.exception("verl-sglang-sync could not register its SGLang hooks; weight sync is off")
        raise
