"""What the ranks of a session share: the request that opens it, and what they agree on."""

from __future__ import annotations

import threading
import traceback
import zlib
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from sglang_loader.session_messages import SESSION_FORMAT, SessionError
from sglang_loader.update_keys import UpdateKeys
from verl_sglang_sync.bucket_stream import Bucket
from verl_sglang_sync.collective import RoundState, TrainerGroup
from verl_sglang_sync.transport import Updater

Result = TypeVar("Result")


class OpeningRequest:
    """The update request, sent by another thread: this one waits on the session's socket.

    The session's socket says what the reply does, and a millisecond or two before: nobody whose
    session ended well has to wait for the reply, but it must be looked at, later (`result`).
    """

    def __init__(self, engine: Updater | None, version: str | None) -> None:
        self._engine = engine
        self._version = version
        self._reply: Future[None] | None = None

    def post(self, invitations: list[bytes]) -> None:
        """Send the request, and return when it has left; its reply is the outcome on all TP ranks.

        What this thread computes next would keep the client's thread from sending it.
        """
        assert self._engine is not None, "only the leader gathers invitations"
        sent = threading.Event()
        self._reply = self._engine.start_update(
            invitations,
            load_format=SESSION_FORMAT,
            flush_cache=True,
            weight_version=self._version,
            key=next(UpdateKeys()),
            sent=sent,
        )
        self._reply.add_done_callback(lambda _: sent.set())  # also if it never left
        sent.wait()

    @property
    def may_have_left(self) -> bool:
        """False if no engine was asked to join; only the leader knows."""
        return self._engine is None or self._reply is not None

    def check(self) -> None:
        """Raise if the engine has answered already: nobody is left to talk to."""
        if self._reply is not None and self._reply.done():
            self._reply.result()
            raise SessionError("the engine ended the update before its session")

    def wait(self) -> None:
        """Wait until there is a reply, good or bad."""
        if self._reply is not None:
            wait([self._reply])

    def result(self) -> None:
        """Wait until there is a reply; raise what went wrong on the engine's side."""
        if self._reply is not None:
            self._reply.result()


class RanksInStep:
    """This rank's success so far, and what all ranks agreed on.

    Attributes:
        error: the message that all ranks raise; None while all is well.
        num_buckets: sent by this rank in this sync.
        num_tensors: likewise.
    """

    def __init__(self, group: TrainerGroup) -> None:
        self.error: str | None = None
        self._group = group
        self._failure: str | None = None
        self.num_buckets = self.num_tensors = 0
        self._checksum = 0

    @property
    def is_well(self) -> bool:
        """True if nothing has failed on this rank, or on another one that has told."""
        return self._failure is None and self.error is None

    def attempt(self, step: Callable[[], Result]) -> Result | None:
        """Run a step unless this rank has failed; keep the traceback if it fails now."""
        return None if self._failure is not None else self.take_part(step)

    def take_part(self, step: Callable[[], Result]) -> Result | None:
        """As `attempt`, but also after a failure: others wait in the step's collectives."""
        try:
            return step()
        except Exception:
            self._failure = self._failure or traceback.format_exc()
            return None

    def sent(self, bucket: Bucket) -> None:
        """Count a bucket into what the ranks compare."""
        self.num_buckets += 1
        self.num_tensors += len(bucket.layout.tensors)
        self._checksum = zlib.crc32(bucket.names, self._checksum)

    def agree(self, *, met: bool = True) -> bool:
        """Exchange states and checksums with all ranks; False if the sync cannot go on.

        Args:
            met: False: this rank still waits for its engine; then all ranks must ask again.
        """
        state = RoundState.END if self._failure is None else RoundState.FAILED
        if not met and self._failure is None:
            state = RoundState.BUCKET
        signature = self.num_tensors << 32 | self._checksum
        result = self._group.agree(state, self._failure, signature)
        if self.error is not None:
            return False
        if result.failures:
            reasons = "\n".join(result.failures)
            self.error = f"weight sync failed; the engine's weights may be incomplete\n{reasons}"
        elif len(set(result.signatures)) > 1:
            self.error = (
                "weight sync failed: the ranks exported different tensors; by rank, number: "
                f"{[signature >> 32 for signature in result.signatures]}, checksum of their "
                f"names: {[signature & 0xFFFFFFFF for signature in result.signatures]}"
            )
        return self.error is None and RoundState.BUCKET not in result.states
