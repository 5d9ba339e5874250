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
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from sglang_loader.broadcast_messages import (
    BROADCAST_COMPILED,
    BROADCAST_FORMATS,
    BroadcastBucket,
    decode_bucket,
)
from sglang_loader.broadcast_receiver import BroadcastReceiver
from sglang_loader.bucket_loader import LOADERS
from sglang_loader.engine_context import device_of
from sglang_loader.gate_hooks import set_gate, why_closed
from sglang_loader.host_backup import backup_of
from sglang_loader.manifest import ManifestError
from sglang_loader.manifest_check import check_manifest, manifest_of_request
from sglang_loader.manifest_verdict import MANIFEST_CHECK, encode_verdict
from sglang_loader.session import ServedSession, serve_session
from sglang_loader.session_messages import SESSION_FORMAT, decode_descriptor
from sglang_loader.update_group import GROUP_PREFIX, abort, connect, errors_left_to_us, leave

logger = logging.getLogger(__name__)

OUR_FORMATS = "sglang_loader."

Original = Callable[..., Any]
Result = TypeVar("Result")


class PrefixCacheInUse(RuntimeError):
    """The prefix cache cannot be dropped; its entries would be of the old weights."""


class SpeculationUnknown(RuntimeError):
    """A kind of speculative decoding whose models are not known."""


def update_on_all_ranks(original: Original, updater: Any, request: Any) -> Any:
    """AROUND `update_weights_from_tensor`: load on every TP rank, then agree on the outcome."""
    if request.load_format == MANIFEST_CHECK:
        return _check_on_all_ranks(updater, request)
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    if request.load_format not in (*LOADERS, SESSION_FORMAT):
        if not str(request.load_format).startswith(OUR_FORMATS):
            return original(updater, request)
        return UpdateWeightsFromTensorReqOutput(
            False,
            f"unknown load_format {request.load_format!r}: the trainer and the engine have "
            "different releases of verl-sglang-sync installed",
        )
    load = _serve_session if request.load_format == SESSION_FORMAT else _load_bucket
    with updater._observe_weight_load("tensor"):
        failures = load(updater, request)
    return UpdateWeightsFromTensorReqOutput(not failures, "\n".join(failures) or "Success")


def _check_on_all_ranks(updater: Any, request: Any) -> Any:
    """Answer a manifest: `message` is the verdict, or why there is none. Nothing is loaded."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    verdict, failure = _attempt(
        updater,
        lambda: check_manifest(
            manifest_of_request(request),
            models_of(updater, request),
            lambda item: from_all_ranks(updater, item),
        ),
    )
    if verdict is None:
        return UpdateWeightsFromTensorReqOutput(False, str(failure))
    return UpdateWeightsFromTensorReqOutput(True, encode_verdict(verdict))


def receive_on_all_ranks(original: Original, updater: Any, request: Any) -> Any:
    """AROUND `update_weights_from_distributed`: a broadcast bucket, see `broadcast_receiver`.

    All TP ranks first agree that they expect this bucket: a rank that refused it alone would leave
    the others waiting in the broadcast.
    """
    if request.load_format not in BROADCAST_FORMATS:
        return original(updater, request)
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqOutput

    runner = updater.tp_worker.model_runner
    receiver = _receivers.setdefault(runner, BroadcastReceiver())

    def expect() -> tuple[BroadcastBucket, Any]:
        bucket = decode_bucket(request.names[0])
        group = runner._model_update_group.get(request.group_name)
        if group is None:
            raise ManifestError(
                f"group {request.group_name!r} was never formed; known: "
                f"{list(runner._model_update_group)}"
            )
        receiver.check(bucket)
        return bucket, group

    with updater._observe_weight_load("distributed"):
        expected, failure = _attempt(updater, expect)
        failures = failures_on_any_rank(updater, failure)
        if not failures and expected is not None:
            bucket, group = expected
            update = _Update(updater, request)

            def load() -> None:
                update.begin()
                flat = receiver.receive(bucket, group, device_of(runner.model))
                compiled = request.load_format == BROADCAST_COMPILED
                receiver.load(runner.model, bucket, flat, compiled=compiled)

            failures = update.run(load)
    if failures:
        _give_up(receiver, runner, request.group_name)
    return UpdateWeightsFromDistributedReqOutput(not failures, "\n".join(failures) or "Success")


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
    with errors_left_to_us():
        success, message = original(runner, *arguments)
    if not success:
        return False, message
    try:
        connect(runner._model_update_group[group_name], device_of(runner.model))
    except Exception:
        logger.exception("cannot connect %s", group_name)
        leave(runner._model_update_group.pop(group_name), broken=True)
        return False, traceback.format_exc()
    return True, message


def leave_group(original: Original, runner: Any, group_name: str) -> tuple[bool, str]:
    """AROUND `ModelRunner.destroy_weights_update_group`: also out of a broadcast that never ends.

    Stock waits for outstanding collectives, so a trainer that died between announcing a bucket and
    sending it would block this process.
    """
    if not group_name.startswith(GROUP_PREFIX) or group_name not in runner._model_update_group:
        left: tuple[bool, str] = original(runner, group_name)
        return left
    group = runner._model_update_group.pop(group_name)
    receiver, is_waiting = _receivers.get(runner), False
    if receiver is not None:
        is_waiting = receiver.is_waiting_in(group)
        receiver.left(group)
    leave(group, broken=is_waiting)
    return True, f"left {group_name}"


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


_receivers: WeakKeyDictionary[Any, BroadcastReceiver] = WeakKeyDictionary()


def _attempt(updater: Any, step: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """The step's result, or this rank's traceback."""
    try:
        return step(), None
    except Exception:
        failure = f"TP rank {updater.tp_worker.tp_rank}: {traceback.format_exc()}"
        logger.error("weight update failed: %s", failure)
        return None, failure


class _Update:
    """One update on this TP rank, in step with the others.

    Args:
        updater: SGLang's.
        request: what it was asked.
    """

    def __init__(self, updater: Any, request: Any) -> None:
        self._updater = updater
        self._request = request
        self._backup = backup_of(updater.tp_worker.model_runner.model)
        self._has_begun = self._has_flushed = False

    def begin(self) -> None:
        """From now on weights are overwritten."""
        self._has_begun = True
        if self._backup is not None:
            self._backup.sync_started()

    def flush(self) -> None:
        """Drop the prefix cache, if this update is a sync's last.

        Raises:
            PrefixCacheInUse: requests are running, on all TP ranks: their queues are in step.
        """
        if not self._request.flush_cache or self._has_flushed:
            return
        self._has_flushed = self._updater.flush_cache(empty_cache=self._request.torch_empty_cache)
        if not self._has_flushed:
            raise PrefixCacheInUse("the prefix cache holds running requests")

    def run(self, load: Callable[[], None]) -> list[str]:
        """Load on every TP rank, agree on the outcome, end the sync with its last bucket.

        Args:
            load: loads on this rank; calls `begin` before it does.

        Returns:
            What went wrong, the same on all ranks.
        """
        _, failure = _attempt(self._updater, load)
        # After a failure, too: the prefix caches of all TP ranks must stay equal.
        _, unflushed = _attempt(self._updater, self.flush)
        outcomes = from_all_ranks(self._updater, (failure or unflushed, self._has_begun))
        failures = [text for text, _ in outcomes if text]
        is_touched = any(has_begun for _, has_begun in outcomes)
        if self._backup is not None:
            if failures and is_touched:
                self._backup.sync_failed("a weight update failed")
            elif not failures and self._request.flush_cache:
                self._backup.sync_completed()
                failures = failures_on_any_rank(self._updater, self._backup.stale)
        if is_touched:  # else all is as it was
            set_gate(why_closed(self._updater) or next(iter(failures), None))
        return failures


def _load_bucket(updater: Any, request: Any) -> list[str]:
    """One bucket of modes "bucketed" and "flattened"; returns what went wrong on any rank."""
    update = _Update(updater, request)

    def load() -> None:
        update.begin()
        success, message = _worker_for(updater, request).update_weights_from_tensor(request)
        if not success:
            raise RuntimeError(message)

    return update.run(load)


def _worker_for(updater: Any, request: Any) -> Any:
    """Whom SGLang asks to update the weights."""
    if updater.draft_worker is not None and not request.disable_draft_model:
        return updater.draft_worker
    return updater.tp_worker


def _serve_session(updater: Any, request: Any) -> list[str]:
    """A sync of mode "compiled"; returns what went wrong on any rank."""
    update = _Update(updater, request)
    served: list[ServedSession] = []

    def load() -> None:
        models = models_of(updater, request)
        invitation = base64.b64decode(request.serialized_named_tensors[updater.tp_worker.tp_rank])
        served.append(
            serve_session(
                decode_descriptor(invitation),
                models,
                once_joined=update.flush,
                before_loading=update.begin,
            )
        )

    failures = update.run(load)
    for session in served:
        session.conclude(failures)
    return failures


def models_of(updater: Any, request: Any) -> list[Any]:
    """The models that SGLang's own update would load, in its order: a draft, then the target.

    Raises:
        SpeculationUnknown: the worker may have others.
    """
    worker, target = _worker_for(updater, request), updater.tp_worker.model_runner.model
    if worker is updater.tp_worker:
        return [target]
    update = getattr(worker, "update_weights_from_tensor", None)
    if getattr(update, "__self__", None) is updater.tp_worker or (
        update is not None and worker.draft_worker is None
    ):
        return [target]  # DFLASH and NGRAM hand the update on
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    own = EAGLEWorkerV2.update_weights_from_tensor
    if getattr(type(worker), "update_weights_from_tensor", None) is own:
        return [worker.draft_worker.draft_runner.model, target]
    raise SpeculationUnknown(
        f"{type(worker).__name__} loads its models in a way that is not known here: weights "
        "cannot be synced with this kind of speculative decoding"
    )


def failures_on_any_rank(updater: Any, failure: str | None) -> list[str]:
    """What went wrong on the TP ranks, the same list on all of them; each must call this."""
    return [text for text in from_all_ranks(updater, failure) if text]


def from_all_ranks(updater: Any, item: Result) -> list[Result]:
    """Every TP rank's `item`, by rank, on all of them; each must call this."""
    group = updater.tp_cpu_group
    items: list[Any] = [item] * torch.distributed.get_world_size(group=group)
    if len(items) > 1:
        torch.distributed.all_gather_object(items, item, group=group)
    return items
