"""What the ranks of a session share: the request that opens it, and what they agree on."""

from __future__ import annotations

import threading
import traceback
import zlib
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from sglang_loader.common.session.messages import SESSION_FORMAT
from verl_sglang_sync.collective import (
    RankLost,
    TrainerGroup,
    WeightSyncError,
    export_signature,
)
from verl_sglang_sync.engine.server_client import ReplyLost, operations
from verl_sglang_sync.engine.server_client.operations import Call
from verl_sglang_sync.engine.session import check_refused, check_unanswered
from verl_sglang_sync.report import log_remarks
from verl_sglang_sync.sources.bucket_stream import Bucket

Result = TypeVar("Result")

SEND_WAIT_S = 1.0
MAY_BE_INCOMPLETE = "the engine's weights may be incomplete"
MAY_SERVE = "the engine may serve the new weights already"


class Engine(Protocol):
    """The engine's server; `SGLangServerClient` is one."""

    def submit(self, call: Call) -> Future[Any]:
        """Start an operation (`operations`); the future gets its reply."""


class OpeningRequest:
    """The update request, sent by another thread: this one waits on the session's socket.

    The session's socket says what the reply does, and a millisecond or two before: nobody whose
    session ended well has to wait for the reply, but it must be looked at, later (`result`).
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
        """Raise if the engine has answered already, or its answer was lost."""
        if self._reply is not None:
            check_unanswered(self._reply)

    def check_refused(self) -> None:
        """Raise if the engine's answer is a failure, or was lost."""
        if self._reply is not None:
            check_refused(self._reply)

    def check_answer(self) -> None:
        """Raise if the engine has answered: nobody is left to talk to. After a lost reply there may
        be: an engine that is yet to join.
        """
        with suppress(ReplyLost):
            self.check()

    def wait(self, limit_s: float) -> bool:
        """Wait until there is a reply, good or bad; False if there is none after `limit_s`."""
        return self._reply is None or bool(wait([self._reply], limit_s).done)

    def give_up(self, limit_s: float) -> None:
        """Wait for the reply to a failed session, `limit_s` at most; then nobody waits for it."""
        if not self.wait(limit_s) and self._reply is not None:
            self._reply.cancel()

    def result(self) -> None:
        """Wait until there is a reply; raise what went wrong on the engine's side."""
        if self._reply is not None:
            log_remarks(self._reply.result())


class RanksInStep:
    """This rank's success so far, and what all ranks agreed on.

    Attributes:
        error: the message that all ranks raise; None while all is well.
        cause: what went wrong first on this rank.
        may_be_served: this rank has told its engine to publish, and not heard that it does not.
        num_buckets: sent by this rank in this sync.
        num_tensors: likewise.
    """

    def __init__(self, group: TrainerGroup) -> None:
        self.error: str | None = None
        self._group = group
        self.cause: Exception | None = None
        self.may_be_served = False
        self._failure: str | None = None
        self._is_rank_lost = False
        self.num_buckets = self.num_tensors = 0
        self._checksum = 0

    def run_if_ok(self, step: Callable[[], Result]) -> Result | None:
        """Run a step unless this rank has failed; keep the traceback if it fails now."""
        return None if self._failure is not None else self.run_always(step)

    def run_always(self, step: Callable[[], Result]) -> Result | None:
        """As `run_if_ok`, but also after a failure: others wait in the step's collectives."""
        try:
            return step()
        except Exception as error:
            self.cause = self.cause or error
            self._failure = self._failure or traceback.format_exc()
            return None

    def repeat_until_all(self, step: Callable[[], bool]) -> bool:
        """Repeat a step, all ranks in step, until it was True on every rank; False after a failure.

        A rank whose step was True takes it again while others wait; it must not wait itself then.
        """
        is_done = False
        while self.error is None:
            is_done = bool(self.run_if_ok(step))
            if self.agree(is_ready=is_done):
                return True
        return False

    def sent(self, bucket: Bucket) -> None:
        """Count a bucket into what the ranks compare."""
        self.num_buckets += 1
        self.num_tensors += len(bucket.layout.tensors)
        self._checksum = zlib.crc32(bucket.names, self._checksum)

    def agree(self, *, is_ready: bool = True) -> bool:
        """Exchange outcomes and checksums with all ranks; False if the sync cannot go on.

        Nobody is asked any more once a rank is lost: the others have left, too.

        Args:
            is_ready: False: this rank still waits for its engine; then all ranks must ask again.
        """
        if self._is_rank_lost:
            return False
        signature = export_signature(self.num_tensors, self._checksum)
        try:
            result = self._group.agree(self._failure, is_ready=is_ready, signature=signature)
        except RankLost as error:
            self._is_rank_lost = True
            told = (str(error), MAY_SERVE if self.may_be_served else None, self._failure)
            self.error = self.error or "\n".join(filter(None, told))
            return False
        if self.error is not None:
            return False
        if result.failures:
            reasons = "\n".join(result.failures)
            state = MAY_SERVE if self.may_be_served else MAY_BE_INCOMPLETE
            self.error = f"weight sync failed; {state}\n{reasons}"
        elif result.other_exports is not None:
            self.error = f"weight sync failed: {result.other_exports}"
        return self.error is None and result.is_ready

    def raise_error(self) -> None:
        """Raise what all ranks agreed went wrong, if anything did.

        Raises:
            WeightSyncError: on every rank; `RankLost` where one of them did not answer.
        """
        if self.error is not None:
            raise (RankLost if self._is_rank_lost else WeightSyncError)(self.error)
