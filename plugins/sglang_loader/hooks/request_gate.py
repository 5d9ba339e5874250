"""The gate that holds requests back while memory is released or weights are incomplete.

An engine that was launched with random weights holds requests back until its first sync. SGLang
would run the requests. In servers that were launched with our loaders, requests wait between the
scheduler's socket and its queues, or are refused:

    gate = RequestGate(limit_s, channels)           # 0: requests are refused at once
    gate.set("the last sync was not complete")       # None: it is open again
    gate.refuse("the trainer needs the GPU")         # None: requests may wait again
    messages = gate.let_through(messages)            # whatever came in, in every round of the loop

Every scheduler process has a gate. The rank that receives requests is the only one that holds any.
This rank broadcasts the requests that its gate lets through. All TP ranks thus get the same
requests in the same round. A held request is in none of SGLang's queues, so that the engine counts
as idle for releases and updates. SGLang's own `pause_generation` would keep requests in the queues.
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
    """The gate of one process. See the module.

    The gate runs in the scheduler's thread, and answers through the scheduler's
    `SchedulerIpcChannels`.

    Args:
        limit_s: longest time that a request waits before it is refused. 0 refuses it at once.

    Attributes:
        reason: the reason why the gate is closed. None if the gate is open.
        refusal: the reason why requests are refused at once, or None if they may wait.
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
        self.refusal: str | None = None

    @property
    def num_held(self) -> int:
        return len(self._held)

    def set(self, reason: str | None) -> None:
        """Close the gate for this reason. None opens the gate."""
        # After an opening, held requests pass in the next round, before new ones.
        if reason is None and self.reason is not None:
            logger.info("requests are served again, %d have waited", self.num_held)
        elif reason != self.reason:
            text = "no request runs (stale_requests_timeout_s=%g): %s"
            logger.info(text, self._limit_s, reason)
        self.reason = reason

    def refuse(self, refusal: str | None) -> None:
        """Refuse held and new requests for this reason, from the next round on. None ends that."""
        self.refusal = refusal

    def let_through(self, messages: list[Any]) -> list[Any]:
        """Return the messages that the scheduler gets in this round.

        If a message may close the gate, requests behind that message are held until the next round.
        By then the message is processed.
        """
        passed: list[Any] = []
        is_open = self.reason is None and self.refusal is None
        if is_open:  # held requests pass before new ones
            passed += [held.request for held in self._held]
            self._held.clear()
        is_uncertain = False  # True behind a message that may close the gate
        for message in messages:
            is_batch = isinstance(message, self._batch)
            # Control messages always pass: a release or an update must reach the scheduler.
            if not is_batch and not isinstance(message, self._single):
                if isinstance(message, self._io.AbortReq):
                    self._abort(message)
                is_uncertain = is_uncertain or isinstance(message, self._closing)
                passed.append(message)
            elif is_open and not is_uncertain:
                passed.append(message)
            elif self.reason == RANDOM_WEIGHTS and all(
                map(is_warm_up, message.batch if is_batch else [message])
            ):
                passed.append(message)  # only the server waits for the answer
            else:
                for request in message.batch if is_batch else [message]:
                    self._hold(request)
        while not is_open and self._held and self._is_due(self._held[0]):
            self._refuse(self._held.popleft().request)
        return passed

    def _is_due(self, held: _Held) -> bool:
        return self.refusal is not None or held.deadline <= self._clock()

    def _hold(self, request: Any) -> None:
        if is_health_probe(request):
            self._answer(request, self._io.HealthCheckOutput())
        else:
            self._held.append(_Held(request, self._clock() + self._limit_s))

    def _refuse(self, request: Any) -> None:
        """Answer with HTTP 503 and the reason."""
        waited = f" for {self._limit_s:g} s" if self._limit_s and self.refusal is None else ""
        reason = {
            "type": "abort",
            "message": f"not served{waited}: {self.refusal or self.reason}",
            "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
            "err_type": "WeightsNotReady",
        }
        self._answer(request, self._io.AbortReq(rid=request.rid, finished_reason=reason))

    def _abort(self, abort: Any) -> None:
        """Confirm the abort of held requests whose ids begin with the message's id, like SGLang."""
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
    """Wrap `Scheduler.init_request_receiver`: make this process's gate."""
    original(scheduler)
    if is_ours(scheduler.server_args):
        global _gate, _has_random_weights
        _gate = RequestGate(requested_stale_requests_timeout_s(), scheduler.ipc_channels)
        _has_random_weights = starts_random(scheduler.server_args)
        if _has_random_weights:
            _gate.set(RANDOM_WEIGHTS)


def receive_through_gate(original: Original, receiver: Any) -> Any:
    """Wrap `SchedulerRequestReceiver._pull_raw_reqs`: return what the gate lets through."""
    # The original returns None on ranks that get messages by broadcast. Later stages of a pipeline
    # get the messages that the first stage has let through.
    messages = original(receiver)
    if _gate is None or messages is None or pp_rank() != 0:
        return messages
    return _gate.let_through(messages)


def closing_reason(updater: Any) -> str | None:
    """Return the reason why this rank's engine must not compute, or None."""
    released = set(updater.offload_tags)
    if CUDA_GRAPH_TAG in released and not graphs_are_released_by_tag():
        released.remove(CUDA_GRAPH_TAG)
    if released:
        return f"the engine's memory is released: {', '.join(sorted(released))}"
    backup = backup_of(updater.tp_worker.model_runner.model)
    if backup is not None and backup.stale is not None:
        return f"the weights are not complete: {backup.stale}"
    if _session_follows:
        return ANOTHER_SESSION
    return RANDOM_WEIGHTS if _has_random_weights else None


def note_published(*, is_last: bool = True) -> None:
    """Record that this rank's weights are not random, and if another session follows.

    Args:
        is_last: if False, another session of the same sync follows, and no request may run before
            it.
    """
    global _has_random_weights, _session_follows
    _has_random_weights, _session_follows = False, not is_last


def note_other_update(original: Original, updater: Any, request: Any) -> Any:
    """Wrap updates that are not ours: they open the gate of an engine with random weights."""
    reply = original(updater, request)
    if _has_random_weights and reply.success:
        note_published()
        set_gate(closing_reason(updater))
        reply = with_facts(reply, closed=gate_reason())
    return reply


def set_gate(reason: str | None) -> None:
    """Close this process's gate for a reason, or open it (None). All TP ranks must do the same."""
    if _gate is not None:
        _gate.set(reason)


def refuse_requests(refusal: str | None) -> None:
    """Make this process's gate refuse all requests at once. None: they may wait again."""
    if _gate is not None:
        _gate.refuse(refusal)


def gate_reason() -> str | None:
    """Return the reason why this process's gate is closed, or None."""
    return None if _gate is None else _gate.reason
