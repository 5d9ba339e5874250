"""What the hook on `SchedulerWeightUpdaterManager.update_weights_from_tensor` does (sglang 0.5.14).

Stock behaviour that it mends, only for servers that were launched with our loaders: an exception
while loading ends the scheduler process, and a failure on any TP rank but 0 is only logged. Here
every rank reports, and the reply fails with rank and traceback.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

import torch

from sglang_loader.bucket_loader import LOADERS
from sglang_loader.host_backup import backup_of
from sglang_loader.session import loading_into

logger = logging.getLogger(__name__)

Original = Callable[..., Any]


def update_on_all_ranks(original: Original, updater: Any, request: Any) -> Any:
    """AROUND `update_weights_from_tensor`: load on every TP rank, then agree on the outcome."""
    if request.load_format not in LOADERS:
        return original(updater, request)
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    failure = None
    backup = backup_of(updater.tp_worker.model_runner.model)
    if backup is not None:
        backup.sync_started()
    with updater._observe_weight_load("tensor"):
        try:
            _load_on_this_rank(updater, request)
        except Exception:
            failure = f"TP rank {updater.tp_worker.tp_rank}: {traceback.format_exc()}"
            logger.error("weight update failed: %s", failure)
    failures = failures_on_any_rank(updater, failure)
    if backup is not None:
        if failures:
            backup.sync_failed("a weight update failed")
        elif request.flush_cache:  # the last bucket
            backup.sync_completed()
            failures = failures_on_any_rank(updater, backup.stale)
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


def failures_on_any_rank(updater: Any, failure: str | None) -> list[str]:
    """What went wrong on the TP ranks, the same list on all of them; each must call this."""
    group = updater.tp_cpu_group
    texts: list[str | None] = [None] * torch.distributed.get_world_size(group=group)
    torch.distributed.all_gather_object(texts, failure, group=group)
    return [text for text in texts if text]
