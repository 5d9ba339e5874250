"""What the hooks on `SchedulerWeightUpdaterManager`'s weight updates do.

Stock behaviour that they mend, only for servers that were launched with our loaders: an exception
while loading ends the scheduler process, and a failure on any TP rank but 0 is only logged. Here
every rank reports, and the reply fails with rank and traceback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_loader.common.check_remarks import with_remark
from sglang_loader.common.session.messages import (
    SESSION_FORMAT,
    SessionDescriptor,
    SessionError,
    decode_descriptor,
)
from sglang_loader.hooks.request_gate import gate_reason
from sglang_loader.hooks.tp_ranks import TPRanks, attempt
from sglang_loader.hooks.update_groups import groups_of
from sglang_loader.hooks.weight_update import WeightUpdate
from sglang_loader.session.serve import ServedSession, SessionSteps, serve_session
from sglang_loader.upstream import handle_of, in_an_update, io_struct, is_idle, is_ours, tell

logger = logging.getLogger(__name__)

OUR_FORMATS = "sglang_loader."
BUSY = "refused: requests are running; the weights are as they were"

Original = Callable[..., Any]


def update_on_all_ranks(original: Original, updater: Any, request: Any) -> Any:
    """AROUND `update_weights_from_tensor`: load on every TP rank, then agree on the outcome."""
    if request.load_format != SESSION_FORMAT:
        if not str(request.load_format).startswith(OUR_FORMATS):
            return _update_of_others(original, updater, request)
        return io_struct().UpdateWeightsFromTensorReqOutput(
            success=False,
            message=f"unknown load_format {request.load_format!r}: the trainer and the engine have "
            "different releases of verl-sglang-sync installed",
        )
    if not _is_idle(updater):
        return _replied([BUSY], is_busy=True)
    update = WeightUpdate(updater, request)
    with updater._observe_weight_load("tensor"):
        failures = _serve_session(update, updater, request)
    return _replied(failures, remark=update.remark)


def _update_of_others(original: Original, updater: Any, request: Any) -> Any:
    if not is_ours(updater.tp_worker.server_args):
        return original(updater, request)
    with in_an_update(updater, request):
        return original(updater, request)


def _is_idle(updater: Any) -> bool:
    """True if no TP rank has requests; their queues are in step but for those of DP attention."""
    if updater.tp_worker.server_args.dp_size > 1:
        return all(TPRanks(updater).gather(is_idle(updater)))
    return is_idle(updater)


def _replied(failures: list[str], *, is_busy: bool = False, remark: str = "") -> Any:
    """SGLang's reply, and what `hooks.http` reads."""
    message = "\n".join(failures) or with_remark(remark)
    reply = io_struct().UpdateWeightsFromTensorReqOutput(success=not failures, message=message)
    return tell(reply, closed=gate_reason(), is_busy=is_busy)


def _invitation_to(updater: Any, request: Any) -> SessionDescriptor:
    invitation = request.serialized_named_tensors[TPRanks(updater).rank]
    return decode_descriptor(handle_of(invitation))


def _serve_session(update: WeightUpdate, updater: Any, request: Any) -> list[str]:
    """One whole sync; returns what went wrong on any rank."""
    served: list[ServedSession] = []
    descriptor, reason = attempt(lambda: _invitation_to(updater, request))
    if descriptor is not None:
        update.manifest_check = descriptor.manifest_check
        update.syncs_draft = descriptor.syncs_draft

    def load() -> None:
        if descriptor is None:
            raise SessionError(f"no invitation to a session\n{reason}")
        groups = groups_of(updater.tp_worker.model_runner, descriptor, update.models)
        steps = SessionSteps(
            once_joined=update.flush, before_loading=update.loading, once_loaded=update.loaded
        )
        served.append(serve_session(descriptor, update.models, steps, *groups))

    failures = update.run(load)
    for session in served:
        session.conclude(failures)
    return failures
