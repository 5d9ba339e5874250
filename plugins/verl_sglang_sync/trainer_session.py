"""The trainer rank's end of a session with the engine rank on its device.

with TrainerSession(sockets, settings, names) as session:
    ...                                   # session.invitation travels with the HTTP request
    while not session.greet(watch, wait_s=1): ...
    slot = session.map_buffer(storage, keep=False)
    session.load(0, bucket, [BucketPiece(slot, 0, 0, nbytes)], read_only=False)
    session.commit(num_buckets=1, num_tensors=3, arrangements=None)
    session.wait_until_done(0)
    outcome = session.outcome()
    session.wait_until_published()
    session.keep_socket()                 # once all ranks have come so far
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch

from sglang_loader import session_messages as wire
from sglang_loader.session_channel import Channel, KeptChannels, trainer_end
from sglang_loader.session_messages import Committed, FromEngine, SessionDescriptor, SessionError
from sglang_loader.shared_buffer import BufferHandle
from verl_sglang_sync.bucket_stream import Bucket
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.memory_blocks import Block, BlockNames, share_block
from verl_sglang_sync.source import Holders, LocatedBucket

Message = TypeVar("Message", bound=wire.FromEngine)

ABORT_WAIT_S = 5.0  # for an engine that was asked to join, and has not yet
MAX_ENDPOINT_CHARS = 100  # a UNIX socket's path has 107


class EngineFailed(RuntimeError):
    """The engine could not load; the text is its TP rank and traceback."""


class SessionSockets:
    """The sockets of this process's sessions, in a private folder (mode 0700)."""

    def __init__(self) -> None:
        self._kept: KeptChannels[FromEngine] = KeptChannels()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._num_sockets = 0

    def take(self) -> Channel[FromEngine]:
        """The socket of the session before, or a new one where that did not end well."""
        return self._kept.take() or trainer_end(self._endpoint())

    def keep(self, channel: Channel[FromEngine]) -> None:
        """For the next session."""
        self._kept.keep(channel)

    def _endpoint(self) -> str:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="weight-sync-")
            if len(self._folder.name) > MAX_ENDPOINT_CHARS - 20:  # a long TMPDIR
                self._folder.cleanup()
                self._folder = tempfile.TemporaryDirectory(prefix="weight-sync-", dir="/tmp")
        self._num_sockets += 1
        return f"ipc://{self._folder.name}/{self._num_sockets}"


class TrainerSession:
    """Speaks the trainer's part of the protocol. A context manager.

    Args:
        sockets: of this process.
        settings: the preset.
        names: of this process's memory, the same for all its sessions.
        used_before: `read_in_place` of the session before this one.

    Attributes:
        arrangements: digest of those that the engine holds for this sync, once they have met.
    """

    def __init__(
        self,
        sockets: SessionSockets,
        settings: WeightSyncConfig,
        names: BlockNames,
        used_before: frozenset[str] = frozenset(),
    ) -> None:
        token = secrets.token_hex(16)
        self._sockets = sockets
        self._channel = sockets.take()
        self._channel.begin(token, timeout_s=settings.request_timeout_s)
        self._is_kept = False
        self.invitation = wire.encode_descriptor(
            SessionDescriptor(
                version=wire.SESSION_VERSION,
                endpoint=self._channel.endpoint,
                token=token,
                timeout_s=settings.request_timeout_s,
                recheck_every_n_syncs=settings.recheck_every_n_syncs,
            )
        )
        self._watch: Callable[[], None] | None = None
        self._names = names
        self._used_before = used_before
        self._known: set[str] = set()
        self._mapped: set[str] = set()
        self._slots: dict[str, int] = {}
        self._read_in_place: set[str] = set()
        self._unsent: list[wire.SharedBuffer] = []
        self._num_done = 0
        self._has_met = False
        self.arrangements = ""

    def greet(self, watch: Callable[[], None], *, wait_s: float) -> bool:
        """Meet the engine; False if it has not joined within `wait_s`: call again.

        Args:
            watch: called while waiting for the engine, here and later; raises to end the wait.
            wait_s: in seconds.
        """
        self._watch = watch
        if not self._channel.wait(wait_s, watch):
            return False
        self._has_met = True
        hello = self._receive(wire.Hello)
        self._known, self._mapped = set(hello.layouts), set(hello.buffers)
        self.arrangements = hello.arrangements
        self._send(wire.Welcome)
        return True

    def has_arrived(self) -> bool:
        """True if `greet` would return at once."""
        return self._channel.has_message()

    @property
    def read_in_place(self) -> frozenset[str]:
        """Names of the blocks of the trainer's own memory that this session has used."""
        return frozenset(self._read_in_place)

    def map_buffer(self, storage: torch.UntypedStorage, *, keep: bool) -> int:
        """Have the engine map a staging buffer with the next bucket, once; return its slot.

        Args:
            storage: all of the buffer.
            keep: it stays mapped after the session.

        Raises:
            ValueError: the memory cannot be shared.
        """
        block = Block.of(storage)
        name = self._names.name_of(block, storage)
        if name not in self._slots:
            self._announce(name, lambda: share_block(block, storage), keep=keep)
        return self._slots[name]

    def map_located(self, located: LocatedBucket, holders: Holders) -> list[wire.BucketPiece]:
        """Have the engine map the trainer's own memory with the next bucket; where that is in it.

        The memory stays mapped after the session if the session before this one used it, too.

        Args:
            located: a bucket that is read in place.
            holders: its tensors, or who else has their storages; at least for every block.

        Raises:
            ValueError: the memory cannot be shared.
        """
        names, slots = located.names(holders, self._names), self._slots
        for i, name in enumerate(names):
            if name not in slots:
                share = partial(_share_member, *located.blocks[i], holders)
                self._announce(name, share, keep=name in self._used_before)
                self._read_in_place.add(name)
        return located.pieces([slots[name] for name in names])

    def _announce(self, name: str, share: Callable[[], BufferHandle], *, keep: bool) -> None:
        slot = self._slots[name] = len(self._slots)
        handle = None if name in self._mapped else share()
        self._unsent.append(wire.SharedBuffer(slot=slot, name=name, handle=handle, keep=keep))

    def load(
        self,
        index: int,
        bucket: Bucket,
        pieces: list[wire.BucketPiece],
        *,
        read_only: bool,
        arranged: str = "",
    ) -> None:
        """Have a bucket loaded; its memory must stay as it is until it is done.

        Args:
            index: position in the sync, from 0.
            bucket: what it is.
            pieces: where its bytes are.
            read_only: the engine must leave them as they are.
            arranged: digest of the arrangements by which they are arranged; "": not at all.
        """
        is_known = bucket.digest in self._known
        buffers, self._unsent = self._unsent, []
        self._send(
            wire.LoadBucket,
            index=index,
            buffers=buffers,
            pieces=pieces,
            digest=bucket.digest,
            layout=None if is_known else bucket.encoded,
            read_only=read_only,
            arranged=arranged,
        )
        self._known.add(bucket.digest)

    def wait_until_done(self, index: int) -> None:
        """Wait until the engine has read bucket `index` and those before it.

        Raises:
            EngineFailed: with the engine's traceback.
            SessionError: the engine is gone, silent, or broke the protocol.
        """
        while self._num_done <= index:
            done = self._receive(wire.BucketDone)
            if done.index != self._num_done:
                raise SessionError(f"bucket {done.index} is done, expected {self._num_done}")
            self._num_done += 1

    def commit(self, *, num_buckets: int, num_tensors: int, arrangements: str | None) -> None:
        """Declare that all was sent, while the engine may still be reading; it checks the counts.

        Args:
            num_buckets: sent.
            num_tensors: sent.
            arrangements: digest of those that this rank knows; None: it wants none.
        """
        self._send(
            wire.Commit,
            num_buckets=num_buckets,
            num_tensors=num_tensors,
            arrangements=arrangements,
        )

    def outcome(self) -> Committed:
        """Wait until this engine rank is complete; every bucket must have been waited for.

        Raises:
            EngineFailed: with the engine's traceback.
            SessionError: the engine is gone, silent, or broke the protocol.
        """
        return self._receive(wire.Committed)

    def wait_until_published(self) -> None:
        """Wait until the weights are complete on all ranks of the engine, after `outcome`.

        Raises:
            EngineFailed: with the engine's traceback, of any of its ranks.
            SessionError: the engine is gone, silent, or broke the protocol.
        """
        self._receive(wire.Published)

    def keep_socket(self) -> None:
        """The sync ended well for both sides: the next session may use the socket, too."""
        self._is_kept = True

    def abort(self, reason: str, watch: Callable[[], None] | None) -> None:
        """Tell the engine to give up, if it still listens; one that is yet to join is waited for,
        `ABORT_WAIT_S` at most.

        Args:
            reason: for the engine's log and reply.
            watch: called while waiting; raises to end it. None: no engine was asked to join.
        """
        if not self._has_met and watch is None:
            return
        with suppress(Exception):  # there is nobody to tell
            if self._has_met or self._channel.wait(ABORT_WAIT_S, watch):
                self._channel.send(wire.Abort, reason=reason)

    def _send(self, kind: type[Any], **fields: Any) -> None:
        """Send; an engine that has failed said why before it left."""
        try:
            self._channel.send(kind, **fields)
        except SessionError:
            while self._channel.has_message():
                message = self._channel.receive()
                if isinstance(message, wire.Failed):
                    raise EngineFailed(message.traceback) from None
            raise

    def _receive(self, kind: type[Message]) -> Message:
        message = self._channel.receive(watch=self._watch)
        if isinstance(message, wire.Failed):
            raise EngineFailed(message.traceback)
        if not isinstance(message, kind):
            raise SessionError(f"expected {kind.__name__}, got {type(message).__name__}")
        return message

    def __enter__(self) -> TrainerSession:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_kept:
            self._sockets.keep(self._channel)
            return
        self._channel.close()


def _share_member(block: Block, member: int, holders: Holders) -> BufferHandle:
    """A handle of the block in which a holder's storage lies; only asked for if it is new."""
    return share_block(block, holders[member].untyped_storage())
