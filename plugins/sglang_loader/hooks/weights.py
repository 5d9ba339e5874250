"""What the hooks on `SchedulerWeightUpdaterManager`'s weight updates do (sglang 0.5.14).

Stock behaviour that they mend, only for servers that were launched with our loaders: an exception
while loading ends the scheduler process, and a failure on any TP rank but 0 is only logged. Here
every rank reports, and the reply fails with rank and traceback.
"""

from __future__ import annotations

import base64
import logging
import traceback
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from sglang_loader.common.broadcast.messages import (
    BROADCAST_COMPILED,
    BROADCAST_FORMATS,
    BroadcastBucket,
    decode_bucket,
)
from sglang_loader.common.broadcast.update_group import (
    GROUP_PREFIX,
    abort,
    check_reachable,
    connect,
    errors_left_to_us,
    leave,
    say_left,
    secret_of,
)
from sglang_loader.common.check_remarks import LoadCounts, with_remark
from sglang_loader.common.layout import WireError
from sglang_loader.common.session.messages import SESSION_FORMAT, decode_descriptor
from sglang_loader.hooks.requests import gate_reason
from sglang_loader.hooks.weight_update import (
    WeightUpdate,
    attempt,
    failures_on_any_rank,
    from_all_ranks,
    models_of,
)
from sglang_loader.session.broadcast_receiver import BroadcastReceiver
from sglang_loader.session.serve import NUM_TRAINERS, ServedSession, serve_session
from sglang_loader.upstream import device_of, io_struct

logger = logging.getLogger(__name__)

OUR_FORMATS = "sglang_loader."

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
        return _replied(io_struct().UpdateWeightsFromTensorReqOutput, [BUSY], is_busy=True)
    update = WeightUpdate(updater, request)
    with updater._observe_weight_load("tensor"):
        failures = _serve_session(update, updater, request)
    return _replied(io_struct().UpdateWeightsFromTensorReqOutput, failures, remark=update.remark)


BUSY = "refused: requests are running; the weights are as they were"


def _is_idle(updater: Any) -> bool:
    """True if no TP rank has requests; their queues are in step but for those of DP attention."""
    is_idle = bool(updater.is_fully_idle())
    if updater.tp_worker.server_args.dp_size > 1:
        return all(from_all_ranks(updater, is_idle))
    return is_idle


def _replied(
    kind: Callable[[bool, str], Any],
    failures: list[str],
    *,
    is_busy: bool = False,
    remark: str = "",
    loaded: LoadCounts | None = None,
) -> Any:
    """SGLang's reply; it is pickled with its attributes, and `hooks.requests` reads these two."""
    reply = kind(not failures, "\n".join(failures) or with_remark(remark, loaded))
    reply.closed, reply.is_busy = gate_reason(), is_busy
    return reply


def receive_on_all_ranks(original: Original, updater: Any, request: Any) -> Any:
    """AROUND `update_weights_from_distributed`: a broadcast bucket, see `broadcast_receiver`.

    All TP ranks first agree that they expect this bucket: a rank that refused it alone would leave
    the others waiting in the broadcast.
    """
    is_ours = request.group_name.startswith(GROUP_PREFIX)
    if request.load_format not in BROADCAST_FORMATS and not is_ours:
        return original(updater, request)
    if gate_reason() is None and not _is_idle(updater):  # between two buckets it is closed
        return _replied(io_struct().UpdateWeightsFromDistributedReqOutput, [BUSY], is_busy=True)
    runner = updater.tp_worker.model_runner
    receiver = _receivers.setdefault(runner, BroadcastReceiver())

    def expect() -> tuple[BroadcastBucket, Any]:
        if request.load_format not in BROADCAST_FORMATS:
            raise WireError(
                f"load_format {request.load_format!r} in {request.group_name}, a group of "
                f"verl-sglang-sync; allowed: {', '.join(BROADCAST_FORMATS)}"
            )
        group = runner._model_update_group.get(request.group_name)
        secret = _secrets.get(request.group_name)
        if group is None or secret is None:
            raise WireError(
                f"group {request.group_name!r} was never formed; known: "
                f"{list(runner._model_update_group)}"
            )
        bucket = decode_bucket(request.names[0], secret)
        receiver.check(bucket, group)
        return bucket, group

    update = WeightUpdate(updater, request)
    loaded: list[LoadCounts] = []
    with updater._observe_weight_load("distributed"):
        expected, failure = attempt(updater, expect)
        failures = failures_on_any_rank(updater, failure)
        if not failures and expected is not None:
            bucket, group = expected
            update.manifest_check = bucket.manifest_check

            def load() -> None:
                flat = receiver.receive(bucket, group, device_of(runner.model))
                update.loading(bucket.layout, is_first=bucket.index == 0)
                compiled = request.load_format == BROADCAST_COMPILED
                loaded.extend(receiver.load(runner.model, bucket, flat, compiled=compiled))

            failures = update.run(load)
    if failures:
        _give_up(receiver, runner, request.group_name)
    return _replied(
        io_struct().UpdateWeightsFromDistributedReqOutput,
        failures,
        remark=update.remark,
        loaded=next(iter(loaded), None),
    )


def join_group(
    original: Original,
    runner: Any,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: str = "nccl",
) -> tuple[bool, str]:
    """AROUND `ModelRunner.init_weights_update_group`: connect ours, see `update_group`."""
    arguments = (master_address, master_port, rank_offset, world_size, group_name, backend)
    if not group_name.startswith(GROUP_PREFIX):
        joined: tuple[bool, str] = original(runner, *arguments)
        return joined
    try:
        if rank_offset:  # else this engine serves the meeting point itself
            check_reachable(master_address, master_port)
    except OSError as error:
        return False, f"{master_address}:{master_port}, where {group_name} is formed: {error}"
    with errors_left_to_us():
        success, message = original(runner, *arguments)
    if not success:
        return False, message
    try:
        group = runner._model_update_group[group_name]
        connect(group, device_of(runner.model))
        _secrets[group_name] = secret_of(group)
    except Exception:
        logger.exception("cannot connect %s", group_name)
        leave(runner._model_update_group.pop(group_name), broken=True)
        return False, traceback.format_exc()
    ours = [name for name in runner._model_update_group if name.startswith(GROUP_PREFIX)]
    for name in ours[:-NUM_TRAINERS]:  # a trainer that died told nobody to leave its group
        _leave(runner, name)
    return True, message


def leave_group(original: Original, runner: Any, group_name: str) -> tuple[bool, str]:
    """AROUND `ModelRunner.destroy_weights_update_group`: also out of a broadcast that never ends.

    Stock waits for outstanding collectives, so a trainer that died between announcing a bucket and
    sending it would block this process.
    """
    if not group_name.startswith(GROUP_PREFIX) or group_name not in runner._model_update_group:
        left: tuple[bool, str] = original(runner, group_name)
        return left
    _leave(runner, group_name)
    return True, f"left {group_name}"


def _leave(runner: Any, group_name: str) -> None:
    group = runner._model_update_group.pop(group_name)
    say_left(group)
    _secrets.pop(group_name, None)
    receiver, is_waiting = _receivers.get(runner), False
    if receiver is not None:
        is_waiting = receiver.is_waiting_in(group)
        receiver.left(group)
    leave(group, broken=is_waiting)


def _give_up(receiver: BroadcastReceiver, runner: Any, group_name: str) -> None:
    """End a failed sync. On a GPU a broadcast that goes on would block whatever frees memory there,
    such as the release of the KV cache; on a CPU `leave_group` ends it, so that the trainer first
    reads this reply."""
    receiver.give_up()
    group = runner._model_update_group.get(group_name)
    on_gpu = device_of(runner.model).type != "cpu"
    if group is not None and on_gpu and receiver.is_waiting_in(group):
        abort(group)
        receiver.left(group)


_secrets: dict[str, bytes] = {}
"""Of the groups that this process is in, by name."""

_receivers: WeakKeyDictionary[Any, BroadcastReceiver] = WeakKeyDictionary()


def _serve_session(update: WeightUpdate, updater: Any, request: Any) -> list[str]:
    """One whole sync; returns what went wrong on any rank."""
    served: list[ServedSession] = []

    def load() -> None:
        update.models = models_of(updater, request)
        invitation = base64.b64decode(request.serialized_named_tensors[updater.tp_worker.tp_rank])
        descriptor = decode_descriptor(invitation)
        update.manifest_check = descriptor.manifest_check
        served.append(
            serve_session(
                descriptor,
                update.models,
                once_joined=update.flush,
                before_loading=update.loading,
                once_loaded=update.loaded,
            )
        )

    failures = update.run(load)
    for session in served:
        session.conclude(failures)
    return failures
