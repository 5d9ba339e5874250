"""The sessions of one trainer rank with engine ranks, and the HTTP requests that open them.

A colocated trainer rank has one session, on its own device, and its replica's leader sends the
request. In disaggregated mode the first trainer rank has one with every engine rank of every
replica, opened by one request for each replica, and the other trainer ranks have none.
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

from sglang_loader.common.ranks import drop_frames
from sglang_loader.common.rounds import SentRound
from sglang_loader.common.session.messages import SESSION_FORMAT, PeerLost, SessionError
from verl_sglang_sync.engine.server_client import operations
from verl_sglang_sync.engine.server_client.errors import ReplyLost, ServerUnreachable
from verl_sglang_sync.engine.server_client.operations import Call
from verl_sglang_sync.engine.session import EngineFailed, TrainerSession
from verl_sglang_sync.report import log_remarks
from verl_sglang_sync.trainer_ranks import AGREE_EVERY_S

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

SEND_WAIT_S = 1.0


class EngineServer(Protocol):
    """The engine's server, such as an `SGLangServerClient`."""

    def submit(self, call: Call) -> Future[Any]:
        """Start one of the `operations`. The future gets its reply."""


class OpeningRequest:
    """The update request of a replica, sent by another thread while this one serves the session.

    The session's socket has the outcome a millisecond or two before the reply comes. So the reply
    to a good session is only checked later (`result`).

    Args:
        engine: the replica's server. None on ranks that do not send the request.
    """

    def __init__(self, engine: EngineServer | None, version: str | None) -> None:
        self._engine = engine
        self._version = version
        self._reply: Future[Any] | None = None

    def post(self, descriptors: list[bytes]) -> None:
        """Send the request, and return when it has left."""
        assert self._engine is not None, "only the leader gathers descriptors"
        sent = threading.Event()
        call = operations.update_weights(
            descriptors,
            load_format=SESSION_FORMAT,
            flush_cache=True,
            weight_version=self._version,
            sent=sent,
        )
        self._reply = self._engine.submit(call)

        def set_sent(_: object) -> None:
            sent.set()

        self._reply.add_done_callback(set_sent)  # also if the request never left
        # What this thread computes next would hold Python's lock, and delay the client's thread.
        # A slow request is no failure here: the wait for the engine to join has the time limit.
        sent.wait(SEND_WAIT_S)

    @property
    def may_have_left(self) -> bool:
        """False if no engine was asked to join. Other ranks than the leader return True."""
        # Only the leader can see whether the request has left. Other ranks expect an engine.
        return self._engine is None or self._reply is not None

    def check(self) -> None:
        """Raise if there is a reply, or if it was lost. Call this before the commit."""
        if self._reply is not None and self._reply.done():
            self._reply.result()
            # A good reply comes only after the session.
            raise SessionError("the engine answered before its session ended, see SGLang's log")

    def check_refused(self) -> None:
        """Raise if the reply is a failure, or was lost. Call this after the commit."""
        # A good reply is no error here: it may come before the session's Published.
        if self._reply is not None and self._reply.done():
            self._reply.result()

    def check_answer(self) -> None:
        """Check as `check` does, but ignore a lost reply."""
        # The engine may have the request, and may still join the session.
        with suppress(ReplyLost):
            self.check()

    def wait(self, limit_s: float) -> bool:
        """Wait for a reply, good or bad. Return False if there is none after `limit_s` seconds."""
        return self._reply is None or bool(wait([self._reply], limit_s).done)

    def give_up(self, limit_s: float) -> str | None:
        """Wait up to `limit_s` seconds for the reply to a failed session, then drop it.

        Returns:
            The error if the server could not be reached or its reply was lost, else None.
        """
        if self._reply is None:
            return None
        if not self.wait(limit_s):
            self._reply.cancel()  # ends the retries, the request itself has left
        elif not self._reply.cancelled() and (error := self._reply.exception()) is not None:
            drop_frames(error)
            if isinstance(error, ReplyLost | ServerUnreachable):
                return str(error)
        return None

    def result(self) -> None:
        """Wait for the reply to a session that was published, and log its remarks.

        Raises:
            Exception: the reply is a failure. A lost reply is only logged.
        """
        if self._reply is None:
            return
        try:
            log_remarks(self._reply.result())
        except ReplyLost as error:
            logger.warning("the weights were published, but the reply was lost: %s", error)


class KnownEngineRank:
    """The part of an engine rank that is kept from sync to sync.

    Args:
        replica: number of its replica among those that this trainer rank has sessions with.

    Attributes:
        is_sent_to: trainer ranks send shards that it cannot map, to the engine rank or to another
            rank of its process group.
        proven_plan: name of the load plan with which the route to this engine rank was proven.
        rounds_digest: digest of `rounds`, or "".
        rounds: the bytes that trainer ranks send, as the engine rank has last listed them.
    """

    def __init__(self, replica: int = 0) -> None:
        self.replica = replica
        self.is_sent_to = False
        self.proven_plan = ""
        self.rounds_digest = ""
        self.rounds: Sequence[SentRound] = ()


@dataclass(frozen=True)
class EngineRank:
    """One engine rank.

    Attributes:
        name: for error messages. "" if colocated, because its errors name the TP rank themselves.
        request: opened the sessions of its replica.
        known: what is kept of it from sync to sync.
    """

    name: str
    session: TrainerSession
    request: OpeningRequest
    known: KnownEngineRank

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Add the name of the engine rank to errors of the body."""
        try:
            yield
        except Exception as error:
            if not self.name:
                raise
            # Callers distinguish these kinds. Exceptions of other kinds may need other arguments.
            kept = EngineFailed | SessionError | ServerUnreachable | ReplyLost
            kind = type(error) if isinstance(error, kept) else SessionError
            raise kind(f"{self.name}: {error}") from error


def poll(engine_ranks: Sequence[EngineRank]) -> None:
    """Process the messages of the engine ranks. Raise if one has failed, or left its session."""
    for engine_rank in engine_ranks:
        with engine_rank.naming_errors():
            engine_rank.session.poll()


def waiting(
    engine_ranks: Sequence[EngineRank],
    holds: Callable[[TrainerSession], bool],
    limit_s: float,
    late: str,
) -> Callable[[], bool | None]:
    """Make this rank's part of a wait of all trainer ranks, for `Ranks.poll`.

    It returns True if a condition holds for every session of this rank, and None after
    `AGREE_EVERY_S`, in which it may not hold. It raises if a session fails, or after `limit_s`.

    Args:
        holds: the condition.
        limit_s: longest time without progress of any session, in seconds.
        late: what was waited for, in the error.
    """
    deadline, progress = 0.0, -1

    def wait_once() -> bool | None:
        nonlocal deadline, progress
        pause = time.monotonic() + AGREE_EVERY_S
        while True:
            poll(engine_ranks)
            unready = next((e for e in engine_ranks if not holds(e.session)), None)
            if unready is None:
                return True
            # An engine that goes on reading is not silent: each step of it begins the limit anew.
            made = sum(e.session.num_receiving + e.session.num_done for e in engine_ranks)
            if made > progress:
                deadline, progress = time.monotonic() + limit_s, made
            if time.monotonic() > deadline:
                with unready.naming_errors():
                    raise PeerLost(f"{late} within {limit_s:g} s")
            if time.monotonic() > pause:
                return None
            unready.session.wait_briefly()

    return wait_once


def wait_for(
    engine_ranks: Sequence[EngineRank], holds: Callable[[TrainerSession], bool], limit_s: float
) -> None:
    """Wait until a condition holds for every session, or one fails.

    Args:
        holds: the condition.
        limit_s: longest time without progress of any of them, in seconds.

    Raises:
        EngineFailed: with the engine's traceback.
        SessionError: an engine is gone, silent, or broke the protocol.
    """
    wait_once = waiting(engine_ranks, holds, limit_s, "no message from the engine")
    while wait_once() is None:
        pass
