"""Entry point `sglang.srt.plugins`: our hooks, registered in every SGLang process.

The hooks are on SGLang's launch, weight updates, memory stages and intake of requests. They do
nothing unless the server was launched with our loaders in `ServerArgs.custom_weight_loader`. Our
replica launches such a server if a `+weight_sync` preset was chosen.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_TOKENIZER = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"


def activate() -> None:
    """Register the hooks. SGLang applies them once all plugins are loaded.

    Raises:
        Exception: any error, after logging it.
    """
    # Imported here, so that an error of an import is logged, too.
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from sglang_loader.hooks import http, memory, request_gate, update_groups, weights
        from sglang_loader.upstream import group_owner_class

        groups_of = group_owner_class()

        for target, hook in (
            (f"{_UPDATER}.update_weights_from_tensor", weights.update_on_all_ranks),
            (f"{_UPDATER}.update_weights_from_distributed", update_groups.refuse_in_our_groups),
            (f"{_UPDATER}.update_weights_from_disk", request_gate.note_other_update),
            (f"{groups_of}.init_weights_update_group", update_groups.join_group),
            (f"{groups_of}.destroy_weights_update_group", update_groups.leave_group),
            (f"{_UPDATER}.release_memory_occupation", memory.release_tags),
            (f"{_UPDATER}.resume_memory_occupation", memory.resume_tags),
            (f"{_RUNNER}.load_model", memory.load_model),
            (f"{_SCHEDULER}.init_request_receiver", request_gate.init_receiver),
            (f"{_RECEIVER}._pull_raw_reqs", request_gate.receive_through_gate),
            (f"{_ENGINE}._launch_subprocesses", http.launch_with_middleware),
            (f"{_TOKENIZER}.update_weights_from_tensor", http.update),
            (f"{_TOKENIZER}.release_memory_occupation", http.release_or_raise),
            (f"{_TOKENIZER}.resume_memory_occupation", http.resume_or_raise),
        ):
            HookRegistry.register(target, hook, HookType.AROUND)
    except Exception:
        # SGLang goes on without a plugin that raises. The log line makes the failure loud.
        logger.exception("verl-sglang-sync could not register its SGLang hooks. Weight sync is off")
        raise
