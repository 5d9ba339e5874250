"""What the hooks on SGLang's `SchedulerWeightUpdaterManager` do (sglang 0.5.14).

Stock behaviour that they mend, only for servers that were launched with our loaders:

- an exception while loading ends the scheduler process, and a failure on any TP rank but 0 is only
  logged: here every rank reports, and the reply fails with rank and traceback;
- resuming a tag that is resident raises KeyError and ends the scheduler, releasing a released one
  unmaps it twice: here both are no-ops.
"""

from __future__ import annotations

import dataclasses
import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_loader.bucket_loader import LOADERS
from sglang_loader.session import loading_into

logger = logging.getLogger(__name__)

Original = Callable[..., Any]


def update_on_all_ranks(original: Original, updater: Any, request: Any) -> Any:
    """AROUND `update_weights_from_tensor`: load on every TP rank, then agree on the outcome."""
    if request.load_format not in LOADERS:
        return original(updater, request)
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    failure = None
    with updater._observe_weight_load("tensor"):
        try:
            _load_on_this_rank(updater, request)
        except Exception:
            failure = f"TP rank {updater.tp_worker.tp_rank}: {traceback.format_exc()}"
            logger.error("weight update failed: %s", failure)
    failures = [text for text in _gather(updater.tp_cpu_group, failure) if text]
    if not failures and request.flush_cache:
        flushed = updater.flush_cache(empty_cache=request.torch_empty_cache)
        if not flushed:  # the same on every TP rank: their request queues are in step
            failures = ["the weights are loaded, but the prefix cache holds running requests"]
    return UpdateWeightsFromTensorReqOutput(not failures, "\n".join(failures) or "Success")


def _load_on_this_rank(updater: Any, request: Any) -> None:
    worker = updater.tp_worker
    if updater.draft_worker is not None and not request.disable_draft_model:
        worker = updater.draft_worker
    with loading_into(_draft_and_target(updater, worker)):
        success, message = worker.update_weights_from_tensor(request)
    if not success:
        raise RuntimeError(message)


def _draft_and_target(updater: Any, worker: Any) -> list[Any]:
    """The models that one update visits in turn (EAGLE: the draft first); empty for one model."""
    runner = getattr(getattr(worker, "draft_worker", None), "draft_runner", None)
    if worker is updater.tp_worker or runner is None:
        return []
    return [runner.model, updater.tp_worker.model_runner.model]


def _gather(group: Any, item: str | None) -> list[str | None]:
    items: list[str | None] = [None] * torch.distributed.get_world_size(group=group)
    torch.distributed.all_gather_object(items, item, group=group)
    return items


def release_resident_tags(original: Original, updater: Any, request: Any) -> Any:
    """AROUND `release_memory_occupation`: releases only the tags that are resident."""
    if not is_ours(updater):
        return original(updater, request)
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

    tags = [tag for tag in _tags(request) if tag not in updater.offload_tags]
    if not tags:
        return ReleaseMemoryOccupationReqOutput()
    return original(updater, dataclasses.replace(request, tags=tags))


def resume_released_tags(original: Original, updater: Any, request: Any) -> Any:
    """AROUND `resume_memory_occupation`: resumes only the tags that are released."""
    if not is_ours(updater):
        return original(updater, request)
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput

    tags = [tag for tag in _tags(request) if tag in updater.offload_tags]
    if not tags:
        return ResumeMemoryOccupationReqOutput()
    return original(updater, dataclasses.replace(request, tags=tags))


def _tags(request: Any) -> Sequence[str]:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    return list(request.tags or GPU_MEMORY_ALL_TYPES)


def is_ours(updater: Any) -> bool:
    """True where the server was launched with our loaders."""
    return any(path in LOADERS for path in updater.tp_worker.server_args.custom_weight_loader or ())
