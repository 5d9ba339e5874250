"""Holds requests back while the engine's memory is released or its weights are incomplete, and
until weights are published where the engine was launched with random ones.

SGLang would run them all the same. Here, in servers that were launched with our loaders, they wait
between the scheduler's socket and its queues, or are refused:

    gate = RequestGate(limit_s, channels)           # 0: requests are refused at once
    gate.set("the last sync was not complete")       # None: it is open again
    messages = gate.let_through(messages)            # whatever came in, in every round of the loop

Every scheduler process has a gate. Only the rank that receives requests holds any, and broadcasts
those that it let through: all TP ranks see the same requests in the same round. A held request is
in none of SGLang's queues, so that the engine counts as idle for releases and updates, unlike with
requests that SGLang's own `pause_generation` keeps.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from sglang_loader.common.engine_settings import (
    CUDA_GRAPH_TAG,
    graphs_are_released_by_tag,
    requested_stale_requests_timeout_s,
)
from sglang_loader.host_backup.backup import backup_of
from sglang_loader.upstream import (
    io_struct,
    is_health_probe,
    is_ours,
    is_warm_up,
    pp_rank,
    starts_random,
    with_facts,
)

logger = logging.getLogger(__name__)

Original = Callable[..., Any]

ANOTHER_SESSION = "a weight sync is not over: what it has brought is being proven"
RANDOM_WEIGHTS = (
    "the engine was launched with random weights (load_format=dummy), and no sync has been "
    "published yet"
)


@dataclass(frozen=True)
class _Held:
    request: Any
    deadline: float


class RequestGate:
    """See the module. Used in the scheduler's thread; answers through its `SchedulerIpcChannels`.

    Args:
        limit_s: longest time that a request waits before it is refused. 0 refuses it at once.

    Attributes:
        reason: why the gate is closed; None: it is open.
    """

    def __init__(
        self, limit_s: float, channels: Any, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._io = io = io_struct()
        self._single = (io.TokenizedGenerateReqInput, io.TokenizedEmbeddingReqInput)
        self._batch = (io.BatchTokenizedGenerateReqInput, io.BatchTokenizedEmbeddingReqInput)
        self._closing = (
            io.ReleaseMemoryOccupationReqInput,
            io.ResumeMemoryOccupationReqInput,
            io.UpdateWeightsFromTensorReqInput,
        )
        self._limit_s = limit_s
        self._channels = channels
        self._clock = clock
        self._held: deque[_Held] = deque()
        self.reason: str | None = None

    @property
    def num_held(self) -> int:
        return len(self._held)

    def set(self, reason: str | None) -> None:
        """Close the gate for this reason. None opens it: held requests pass in the next round,
        before new ones.
        """
        if reason is None and self.reason is not None:
            logger.info("requests are served again; %d have waited", self.num_held)
        elif reason != self.reason:
            text = "no request runs (stale_requests_timeout_s=%g): %s"
            logger.info(text, self._limit_s, reason)
        self.reason = reason

    def let_through(self, messages: list[Any]) -> list[Any]:
        """The messages that the scheduler gets in this round.

        A request after a message that may close the gate is held until the next round: by then that
        message is processed.
        """
        passed: list[Any] = []
        if self.reason is None:
            passed += [held.request for held in self._held]
            self._held.clear()
        is_uncertain = False
        for message in messages:
            is_batch = isinstance(message, self._batch)
            if not is_batch and not isinstance(message, self._single):
                if isinstance(message, self._io.AbortReq):
                    self._abort(message)
                is_uncertain = is_uncertain or isinstance(message, self._closing)
                passed.append(message)
            elif self.reason is None and not is_uncertain:
                passed.append(message)
            elif self.reason == RANDOM_WEIGHTS and all(
                map(is_warm_up, message.batch if is_batch else [message])
            ):
                passed.append(message)  # nobody reads the answer, and the server waits for it
            else:
                for request in message.batch if is_batch else [message]:
                    self._hold(request)
        while self.reason is not None and self._held and self._held[0].deadline <= self._clock():
            self._refuse(self._held.popleft().request)
        return passed

    def _hold(self, request: Any) -> None:
        if is_health_probe(request):
            self._answer(request, self._io.HealthCheckOutput())
        else:
            self._held.append(_Held(request, self._clock() + self._limit_s))

    def _refuse(self, request: Any) -> None:
        """Answer with HTTP 503 and the reason."""
        waited = f" for {self._limit_s:g} s" if self._limit_s else ""
        reason = {
            "type": "abort",
            "message": f"not served{waited}: {self.reason}",
            "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
            "err_type": "WeightsNotReady",
        }
        self._answer(request, self._io.AbortReq(rid=request.rid, finished_reason=reason))

    def _abort(self, abort: Any) -> None:
        """Confirm the abort of held requests whose ids begin with its id, as SGLang does."""
        kept: deque[_Held] = deque()
        for held in self._held:
            rid = held.request.rid
            if abort.abort_all or rid.startswith(abort.rid):
                self._answer(held.request, self._io.AbortReq(rid=rid, finished_reason=None))
            else:
                kept.append(held)
        self._held = kept

    def _answer(self, request: Any, answer: Any) -> None:
        self._channels.send_to_tokenizer.send_output(answer, request)


_gate: RequestGate | None = None
_has_random_weights = False
_session_follows = False


def init_receiver(original: Original, scheduler: Any) -> None:
    """AROUND `Scheduler.init_request_receiver`: makes this process's gate."""
    original(scheduler)
    if is_ours(scheduler.server_args):
        global _gate, _has_random_weights
        _gate = RequestGate(requested_stale_requests_timeout_s(), scheduler.ipc_channels)
        _has_random_weights = starts_random(scheduler.server_args)
        if _has_random_weights:
            _gate.set(RANDOM_WEIGHTS)


def receive_through_gate(original: Original, receiver: Any) -> Any:
    """AROUND `SchedulerRequestReceiver._pull_raw_reqs`: returns what the gate lets through.

    The original returns None on ranks that get messages by broadcast. Later stages of a pipeline
    get the messages that the first stage has let through.
    """
    messages = original(receiver)
    if _gate is None or messages is None or pp_rank() != 0:
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
    if _session_follows:
        return ANOTHER_SESSION
    return RANDOM_WEIGHTS if _has_random_weights else None


def note_published(*, is_last: bool = True) -> None:
    """Record that this rank's weights are random no more.

    Args:
        is_last: False: another session of the same sync follows, before which no request may run.
    """
    global _has_random_weights, _session_follows
    _has_random_weights, _session_follows = False, not is_last


def note_other_update(original: Original, updater: Any, request: Any) -> Any:
    """AROUND updates that are not ours, which open the gate of an engine with random weights."""
    reply = original(updater, request)
    if _has_random_weights and reply.success:
        note_published()
        set_gate(why_closed(updater))
        reply = with_facts(reply, closed=gate_reason())
    return reply


def set_gate(reason: str | None) -> None:
    """Close or open (None) this process's gate; all TP ranks must give the same reason."""
    if _gate is not None:
        _gate.set(reason)


def gate_reason() -> str | None:
    """Why this process's gate is closed, or None."""
    return None if _gate is None else _gate.reason
