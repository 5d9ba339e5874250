"""The gate between a scheduler's socket and its queues: no request runs while the engine's memory
is released or its weights are not those of one complete sync.

    gate = RequestGate(policy_of_this_process(), traffic)
    gate.close("the last sync was not complete")     # and gate.open()
    messages = gate.let_through(messages)            # whatever came in, in every round of the loop

There is one in every scheduler process. Only the rank that receives requests holds any, and it
broadcasts what it let through: all TP ranks see the same requests in the same round. A held
request is in none of SGLang's queues, so that the engine is idle for releases and updates.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_loader.common.engine_settings import GatePolicy

logger = logging.getLogger(__name__)


class Traffic(Protocol):
    """What the gate must know of the engine's messages."""

    def requests_in(self, message: Any) -> list[Any] | None:
        """The requests for tokens or embeddings that a message brings; None: another message."""

    def is_probe(self, request: Any) -> bool:
        """True if the request asks for nothing but a sign of life."""

    def aborts(self, message: Any) -> Callable[[Any], bool] | None:
        """Which requests a message aborts; None if it is not that kind of message."""

    def may_close(self, message: Any) -> bool:
        """True if handling the message may close the gate."""

    def refuse(self, request: Any, reason: str) -> None:
        """Answer the request with a failure."""

    def confirm_abort(self, request: Any) -> None:
        """Answer a request that was aborted before it ran."""

    def answer_probe(self, request: Any) -> None:
        """Give the sign of life."""


@dataclass(frozen=True)
class _Held:
    request: Any
    deadline: float


class RequestGate:
    """See the module; belongs to the scheduler's thread.

    Args:
        policy: what happens to requests meanwhile.
        traffic: the engine's messages.
        clock: seconds that only grow.
    """

    def __init__(
        self, policy: GatePolicy, traffic: Traffic, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._policy = policy
        self._traffic = traffic
        self._clock = clock
        self._held: deque[_Held] = deque()
        self.reason: str | None = None

    @property
    def num_held(self) -> int:
        """Requests that wait."""
        return len(self._held)

    def close(self, reason: str) -> None:
        """From now on no request is let through; `reason` is what a refusal says."""
        if reason != self.reason:
            logger.info("no request is served (%s): %s", self._policy.kind, reason)
        self.reason = reason

    def open(self) -> None:
        """What is held goes in the next round, before what comes then."""
        if self.reason is not None:
            logger.info("requests are served again; %d have waited", self.num_held)
        self.reason = None

    def let_through(self, messages: list[Any]) -> list[Any]:
        """The messages that the scheduler gets in this round.

        A request behind a message that may close the gate waits for the next round: only then is
        it known what has become of that message.
        """
        passed = self._due()
        is_uncertain = False
        for message in messages:
            requests = self._traffic.requests_in(message)
            if requests is None:
                if (aborted := self._traffic.aborts(message)) is not None:
                    self._abort(aborted)
                is_uncertain = is_uncertain or self._traffic.may_close(message)
                passed.append(message)
            elif self.reason is None and not is_uncertain:
                passed.append(message)
            else:
                for request in requests:
                    self._stop(request)
        return passed

    def _due(self) -> list[Any]:
        """What was held and goes now; what has waited too long, or may not wait, is refused."""
        if self.reason is None:
            due = [held.request for held in self._held]
            self._held.clear()
            return due
        now = self._clock()
        while self._held and (self._policy.kind == "refuse" or self._held[0].deadline <= now):
            self._refuse(self._held.popleft().request)
        return []

    def _stop(self, request: Any) -> None:
        if self._traffic.is_probe(request):
            self._traffic.answer_probe(request)
        elif self.reason is not None and self._policy.kind == "refuse":
            self._refuse(request)
        else:
            self._held.append(_Held(request, self._clock() + self._policy.timeout_s))

    def _refuse(self, request: Any) -> None:
        waited = ""
        if self._policy.kind == "wait":
            waited = f" for {self._policy.timeout_s:g} s"
        self._traffic.refuse(request, f"not served{waited}: {self.reason}")

    def _abort(self, aborted: Callable[[Any], bool]) -> None:
        kept: deque[_Held] = deque()
        for held in self._held:
            if aborted(held.request):
                self._traffic.confirm_abort(held.request)
            else:
                kept.append(held)
        self._held = kept
