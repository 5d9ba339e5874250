"""What the hooks between SGLang's sockets and queues do (sglang 0.5.14).

Stock behaviour that they mend, only for servers that were launched with our loaders: a request
that comes while the engine sleeps, or between two buckets of a sync, is run, on memory that is not
mapped or on weights of two versions. Here a `RequestGate` holds it back.

In the process that serves HTTP an `UpdateLock` keeps that from blocking the very sync that the
request waits for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from http import HTTPStatus
from typing import Any

from sglang_loader.common.engine_settings import (
    CUDA_GRAPH_TAG,
    graphs_are_released_by_tag,
    requested_gate_policy,
)
from sglang_loader.hooks.request_gate import RequestGate
from sglang_loader.host_backup import backup_of
from sglang_loader.upstream import io_struct, is_health_probe, is_ours

Original = Callable[..., Any]

BUSY_WAIT_S = 5.0
BUSY_POLL_S = 0.005

_gate: RequestGate | None = None


def init_receiver(original: Original, scheduler: Any) -> None:
    """AROUND `Scheduler.init_request_receiver`: makes this process's gate."""
    original(scheduler)
    if is_ours(scheduler.server_args):
        global _gate
        _gate = RequestGate(requested_gate_policy(), SGLangTraffic(scheduler.ipc_channels))


def pull(original: Original, receiver: Any) -> Any:
    """AROUND `SchedulerRequestReceiver._pull_raw_reqs`: what the gate lets through.

    It runs before the broadcast to the other ranks, where there is None to pull. Behind the first
    stage of a pipeline it gets what the first let through.
    """
    messages = original(receiver)
    if _gate is None or messages is None or receiver.ps.pp_rank != 0:
        return messages
    return _gate.let_through(messages)


def why_closed(updater: Any) -> str | None:
    """Why this rank's engine must not compute now, or None."""
    released = sorted(updater.offload_tags)
    if not graphs_are_released_by_tag():
        released = [tag for tag in released if tag != CUDA_GRAPH_TAG]
    if released:
        return f"the engine's memory is released: {', '.join(released)}"
    backup = backup_of(updater.tp_worker.model_runner.model)
    if backup is not None and backup.stale is not None:
        return f"the weights are not complete: {backup.stale}"
    return None


def set_gate(reason: str | None) -> None:
    """Close this process's gate, or open it; the reason is that of all TP ranks."""
    if _gate is None:
        return
    if reason is None:
        _gate.open()
    else:
        _gate.close(reason)


def gate_reason() -> str | None:
    """Why this process's gate is closed, or None."""
    return None if _gate is None else _gate.reason


class SGLangTraffic:
    """SGLang's messages; see `request_gate.Traffic`.

    Args:
        channels: the scheduler's `SchedulerIpcChannels`.
    """

    def __init__(self, channels: Any) -> None:
        self._io = messages = io_struct()
        self._channels = channels
        self._single = (
            messages.TokenizedGenerateReqInput,
            messages.TokenizedEmbeddingReqInput,
        )
        self._batch = (
            messages.BatchTokenizedGenerateReqInput,
            messages.BatchTokenizedEmbeddingReqInput,
        )
        self._closing = (
            messages.ReleaseMemoryOccupationReqInput,
            messages.ResumeMemoryOccupationReqInput,
            messages.UpdateWeightsFromTensorReqInput,
            messages.UpdateWeightsFromDistributedReqInput,
        )

    def requests_in(self, message: Any) -> list[Any] | None:
        """See `Traffic`."""
        if isinstance(message, self._single):
            return [message]
        return list(message.batch) if isinstance(message, self._batch) else None

    def is_probe(self, request: Any) -> bool:
        """See `Traffic`."""
        return is_health_probe(request)

    def aborts(self, message: Any) -> Callable[[Any], bool] | None:
        """See `Traffic`; by the beginning of the id, as SGLang's scheduler does."""
        if not isinstance(message, self._io.AbortReq):
            return None
        return lambda request: message.abort_all or request.rid.startswith(message.rid)

    def may_close(self, message: Any) -> bool:
        """See `Traffic`."""
        return isinstance(message, self._closing)

    def refuse(self, request: Any, reason: str) -> None:
        """See `Traffic`: HTTP 503 with the reason."""
        self._send_abort(
            request,
            {
                "type": "abort",
                "message": reason,
                "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
                "err_type": "WeightsNotReady",
            },
        )

    def confirm_abort(self, request: Any) -> None:
        """See `Traffic`."""
        self._send_abort(request, None)

    def answer_probe(self, request: Any) -> None:
        """See `Traffic`."""
        self._channels.send_to_tokenizer.send_output(self._io.HealthCheckOutput(), request)

    def _send_abort(self, request: Any, finished_reason: dict[str, Any] | None) -> None:
        answer = self._io.AbortReq(rid=request.rid, finished_reason=finished_reason)
        self._channels.send_to_tokenizer.send_output(answer, request)


# In the process that serves HTTP.


class UpdateLock:
    """Stands in for SGLang's lock between requests and updates, and opens it while the gate is
    closed.

    A request holds the lock until it is answered, and an update waits for it. One that waits at
    the gate would keep the update from coming that it waits for. Nothing else runs then: the gate
    closes only while the engine is idle.

    Args:
        lock: SGLang's own.

    Attributes:
        is_closed: the engine's last word on its gate.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.is_closed = False

    @property
    def writer_lock(self) -> AbstractAsyncContextManager[Any]:
        """What an update enters."""
        if self.is_closed:
            return nullcontext()
        lock: AbstractAsyncContextManager[Any] = self._lock.writer_lock
        return lock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def update_lock_of(manager: Any) -> UpdateLock:
    """The lock of a tokenizer manager, which it gets with the first use."""
    if not isinstance(manager.model_update_lock, UpdateLock):
        manager.model_update_lock = UpdateLock(manager.model_update_lock)
    lock: UpdateLock = manager.model_update_lock
    return lock


def note_gate(manager: Any, replies: Sequence[Any]) -> None:
    """Take over what the engine's replies say of its gate, where they say anything."""
    if told := [reply.closed for reply in replies if hasattr(reply, "closed")]:
        update_lock_of(manager).is_closed = any(told)


async def ask_until_idle(
    communicator: Callable[[Any], Awaitable[Iterable[Any]]], request: Any
) -> list[Any]:
    """Have the engine execute a request, and again while it is busy, `BUSY_WAIT_S` at most.

    Requests that are answered may not be wound up yet in the scheduler, which then refuses before
    it touches anything (`is_busy`).

    Returns:
        Its last replies.
    """
    deadline = time.monotonic() + BUSY_WAIT_S
    while True:
        replies = list(await communicator(request))
        is_busy = any(getattr(reply, "is_busy", False) for reply in replies)
        if not is_busy or time.monotonic() > deadline:
            return replies
        await asyncio.sleep(BUSY_POLL_S)


class UpdateCommunicator:
    """Stands in for SGLang's communicator of weight updates: asks a busy engine again.

    No new requests come meanwhile: whoever calls this holds the writer lock, or generation is
    paused.

    Args:
        manager: the tokenizer manager.
        communicator: SGLang's.
    """

    def __init__(self, manager: Any, communicator: Any) -> None:
        self._manager = manager
        self._communicator = communicator

    async def __call__(self, request: Any) -> list[Any]:
        """Have the engine execute the request; its replies."""
        replies = await ask_until_idle(self._communicator, request)
        note_gate(self._manager, replies)
        return replies


async def update(original: Original, manager: Any, obj: Any, request: Any = None) -> Any:
    """AROUND `TokenizerControlMixin.update_weights_from_tensor`."""
    if is_ours(manager.server_args):
        communicator = manager.update_weights_from_tensor_communicator
        if not isinstance(communicator, UpdateCommunicator):
            manager.update_weights_from_tensor_communicator = UpdateCommunicator(
                manager, communicator
            )
        update_lock_of(manager)
    return await original(manager, obj, request)
