"""What the hooks on `SchedulerWeightUpdaterManager`'s weight updates do (sglang 0.5.14).

Stock behaviour that they mend, only for servers that were launched with our loaders: an exception
while loading ends the scheduler process, and a failure on any TP rank but 0 is only logged. Here
every rank reports, and the reply fails with rank and traceback.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from typing import Any

from sglang_loader.common.check_remarks import with_remark
from sglang_loader.common.session.messages import SESSION_FORMAT, decode_descriptor
from sglang_loader.hooks.request_gate import gate_reason
from sglang_loader.hooks.tp_ranks import TPRanks
from sglang_loader.hooks.update_groups import groups_of
from sglang_loader.hooks.weight_update import WeightUpdate, models_of
from sglang_loader.session.serve import ServedSession, SessionSteps, serve_session
from sglang_loader.upstream import io_struct

logger = logging.getLogger(__name__)

OUR_FORMATS = "sglang_loader."
BUSY = "refused: requests are running; the weights are as they were"

Original = Callable[..., Any]


def update_on_all_ranks(original: Original, updater: Any, request: Any) -> Any:
    """AROUND `update_weights_from_tensor`: load on every TP rank, then agree on the outcome."""
    if request.load_format != SESSION_FORMAT:
        if not str(request.load_format).startswith(OUR_FORMATS):
            return original(updater, request)
        return io_struct().UpdateWeightsFromTensorReqOutput(
            False,
            f"unknown load_format {request.load_format!r}: the trainer and the engine have "
            "different releases of verl-sglang-sync installed",
        )
    if not _is_idle(updater):
        return _replied([BUSY], is_busy=True)
    update = WeightUpdate(updater, request)
    with updater._observe_weight_load("tensor"):
        failures = _serve_session(update, updater, request)
    return _replied(failures, remark=update.remark)


def _is_idle(updater: Any) -> bool:
    """True if no TP rank has requests; their queues are in step but for those of DP attention."""
    is_idle = bool(updater.is_fully_idle())
    if updater.tp_worker.server_args.dp_size > 1:
        return all(TPRanks(updater).gather(is_idle))
    return is_idle


def _replied(failures: list[str], *, is_busy: bool = False, remark: str = "") -> Any:
    """SGLang's reply; it is pickled with its attributes, and `hooks.http` reads these two."""
    message = "\n".join(failures) or with_remark(remark)
    reply = io_struct().UpdateWeightsFromTensorReqOutput(not failures, message)
    reply.closed, reply.is_busy = gate_reason(), is_busy
    return reply


def _serve_session(update: WeightUpdate, updater: Any, request: Any) -> list[str]:
    """One whole sync; returns what went wrong on any rank."""
    served: list[ServedSession] = []

    def load() -> None:
        update.models = models = models_of(updater, request)
        invitation = base64.b64decode(request.serialized_named_tensors[updater.tp_worker.tp_rank])
        descriptor = decode_descriptor(invitation)
        update.manifest_check = descriptor.manifest_check
        groups = groups_of(updater.tp_worker.model_runner, descriptor, models)
        steps = SessionSteps(
            once_joined=update.flush, before_loading=update.loading, once_loaded=update.loaded
        )
        served.append(serve_session(descriptor, models, steps, *groups))

    failures = update.run(load)
    for session in served:
        session.conclude(failures)
    return failures
