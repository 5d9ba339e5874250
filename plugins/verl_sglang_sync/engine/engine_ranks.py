"""The engine ranks with which one trainer rank has a session each, and the requests that open them.

A colocated trainer rank has one, on its own device, and its replica's leader sends the request. In
disaggregated mode the first trainer rank has one with every engine rank of every replica, opened by
a request a replica, and the other trainer ranks have none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from sglang_loader.common.session.messages import SESSION_FORMAT, SessionError
from verl_sglang_sync.engine.arrangements import EngineArrangements
from verl_sglang_sync.engine.server_client import ReplyLost, ServerUnreachable, operations
from verl_sglang_sync.engine.server_client.operations import Call
from verl_sglang_sync.engine.session import EngineFailed, TrainerSession
from verl_sglang_sync.report import log_remarks

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

SEND_WAIT_S = 1.0


class Engine(Protocol):
    """The engine's server; `SGLangServerClient` is one."""

    def submit(self, call: Call) -> Future[Any]:
        """Start an operation (`operations`); the future gets its reply."""


class OpeningRequest:
    """The update request, sent by another thread: this one waits on the session's socket.

    The session's socket says what the reply does, and a millisecond or two before: nobody whose
    session ended well has to wait for the reply, but it must be looked at, later (`result`).

    Args:
        engine: the replica's server; None on ranks that do not send the request.
    """

    def __init__(self, engine: Engine | None, version: str | None) -> None:
        self._engine = engine
        self._version = version
        self._reply: Future[Any] | None = None

    def post(self, invitations: list[bytes]) -> None:
        """Send the request, and return when it has left; its reply is the outcome on all TP ranks.

        What this thread computes next would keep the client's thread from sending it.
        """
        assert self._engine is not None, "only the leader gathers invitations"
        sent = threading.Event()
        call = operations.update_weights(
            invitations,
            load_format=SESSION_FORMAT,
            flush_cache=True,
            weight_version=self._version,
            sent=sent,
        )
        self._reply = self._engine.submit(call)
        self._reply.add_done_callback(lambda _: sent.set())  # also if it never left
        sent.wait(SEND_WAIT_S)

    @property
    def may_have_left(self) -> bool:
        """False if no engine was asked to join; only the leader knows."""
        return self._engine is None or self._reply is not None

    def check(self) -> None:
        """Raise if the engine has answered, or its answer was lost: it has left the session early,
        as it answers after the commit.
        """
        if self._reply is not None and self._reply.done():
            self._reply.result()
            raise SessionError("the engine ended the update before its session")

    def check_refused(self) -> None:
        """Raise if the engine's answer is a failure, or was lost. After the commit: a good one may
        come before the session has told of the publication.
        """
        if self._reply is not None and self._reply.done():
            self._reply.result()

    def check_answer(self) -> None:
        """Raise if the engine has answered: it has left the session. A lost answer proves nothing:
        the engine may still join.
        """
        with suppress(ReplyLost):
            self.check()

    def wait(self, limit_s: float) -> bool:
        """Wait until there is a reply, good or bad; False if there is none after `limit_s`."""
        return self._reply is None or bool(wait([self._reply], limit_s).done)

    def give_up(self, limit_s: float) -> str | None:
        """Wait for the reply to a failed session, `limit_s` at most; then nobody waits for it.

        Returns:
            How the server was lost; None: it has replied, or may still do so.
        """
        if self._reply is None:
            return None
        if not self.wait(limit_s):
            self._reply.cancel()
        elif not self._reply.cancelled() and (error := self._reply.exception()) is not None:
            drop_frames(error)
            if isinstance(error, ReplyLost | ServerUnreachable):
                return str(error)
        return None

    def result(self) -> None:
        """Wait until there is a reply to a session that has told of the publication.

        Raises:
            Exception: the reply is bad. One that was lost is only logged.
        """
        if self._reply is None:
            return
        try:
            log_remarks(self._reply.result())
        except ReplyLost as error:
            logger.warning("the weights were published, but the reply was lost: %s", error)


def drop_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and of its causes: their frames keep tensors in memory."""
    while error is not None:
        error.with_traceback(None)
        error = error.__cause__ or error.__context__


@dataclass(frozen=True)
class EngineRank:
    """One engine rank.

    Attributes:
        name: for messages; "" of the one on this rank's device, which names its TP rank itself.
        request: opens the sessions of its replica.
        arrangements: what it reads of the buckets, kept from sync to sync.
    """

    name: str
    session: TrainerSession
    request: OpeningRequest
    arrangements: EngineArrangements

    @contextmanager
    def naming(self) -> Iterator[None]:
        """An error of the body says of which engine rank it is."""
        try:
            yield
        except Exception as error:
            if not self.name:
                raise
            kind = type(error) if isinstance(error, EngineFailed) else SessionError
            raise kind(f"{self.name}: {error}") from error


def each(engines: Sequence[EngineRank], step: Callable[[EngineRank], Result]) -> list[Result]:
    """Do something with every engine rank; an error names the one."""
    results = []
    for engine in engines:
        with engine.naming():
            results.append(step(engine))
    return results


def poll(engines: Sequence[EngineRank]) -> None:
    """Take note of what the engine ranks have said; raise if one has failed, or ended its part."""
    each(engines, lambda engine: engine.session.poll())


def wait_for(
    engines: Sequence[EngineRank], has_come: Callable[[TrainerSession], bool], limit_s: float
) -> None:
    """Wait until something holds of every session, as long as none fails.

    Args:
        engines: on which this rank waits.
        has_come: what is waited for, of one session.
        limit_s: longest time in which none of them makes progress, in seconds.

    Raises:
        EngineFailed: with the engine's traceback.
        SessionError: an engine is gone, silent, or broke the protocol.
    """
    deadline, progress = time.monotonic() + limit_s, -1
    while True:
        poll(engines)
        waiting = next((e for e in engines if not has_come(e.session)), None)
        if waiting is None:
            return
        made = sum(e.session.num_receiving + e.session.num_done for e in engines)
        if made > progress:
            deadline, progress = time.monotonic() + limit_s, made
        if time.monotonic() > deadline:
            with waiting.naming():
                raise SessionError(f"no message from the engine within {limit_s:g} s")
        waiting.session.wait_briefly()
