"""The trainer's end of a session with an engine rank.

with TrainerSession(sockets, settings, names) as session:
    ...                                   # session.descriptor goes with the HTTP request
    while not session.accept(watch, wait_s=1): ...
    slot = session.map_buffer(storage, keep=False)
    session.load(0, bucket, slot)
    session.finish(num_tensors=3)
    ...                                   # until session.loaded, see `engine_ranks.waiting`
    session.commit(watch, is_last=True)   # once all ranks have come so far
    session.wait_until_published()
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch

from sglang_loader.common.host_memory import HostHandle
from sglang_loader.common.layout import digest_of
from sglang_loader.common.session import messages
from sglang_loader.common.session.channel import Channel, trainer_end, trainer_end_on_network
from sglang_loader.common.session.folder import SessionFolder
from sglang_loader.common.session.messages import (
    FromEngine,
    Loaded,
    SessionDescriptor,
    SessionError,
)
from sglang_loader.common.shared_memory import BufferHandle, drop_references
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.sources.bucket_cutter import Bucket
from verl_sglang_sync.sources.memory_blocks import Block, BlockNames, share_block

Message = TypeVar("Message", bound=messages.FromEngine)

ABORT_WAIT_S = 5.0  # for an engine that was asked to join, and has not joined yet


class EngineFailed(RuntimeError):
    """A failure of the engine. The text is the TP rank and its traceback."""


class EngineCannotMap(EngineFailed):
    """An engine that cannot map the trainer's memory. It may have read earlier loads."""


class ProofFailed(EngineFailed):
    """A failed proof: the engine held other bytes than it was sent. The text names the tensors."""


class SavedPlanFailed(EngineFailed):
    """A failed proof of a load plan that the engine had saved earlier, and has dropped now."""


class Misfit(EngineFailed):
    """The tensors do not fit the engine's model, and would not if they were sent again."""


class BlockNotMapped(RuntimeError):
    """The engine no longer maps memory for which this rank has no new handle."""


@dataclass(frozen=True)
class StoredBytes:
    """Bytes that engines store, and the digest by which messages name them."""

    data: bytes
    digest: str

    @classmethod
    def of(cls, data: bytes) -> StoredBytes:
        return cls(data, digest_of(data))


class _Forks:
    """The number of times that this process has forked."""

    num = 0

    def count(self) -> None:
        self.num += 1


_forks = _Forks()
os.register_at_fork(after_in_parent=_forks.count, after_in_child=_forks.count)


class SessionSockets:
    """The sockets of this process's sessions.

    Args:
        host: this process's address, for TCP sockets that engines on other hosts can reach. None:
            the sockets are in a folder of this process.
    """

    def __init__(self, host: str | None = None) -> None:
        self._host = host
        self._folder: SessionFolder | None = None
        self._spare: Channel[FromEngine] | None = None
        self._num_forks = 0  # of this process, when the spare was opened

    def open(self) -> Channel[FromEngine]:
        """Open a socket for another session."""
        if self._host is not None:
            return trainer_end_on_network(self._host)
        spare, self._spare = self._spare, None
        # A cleaner of temporary files may have removed it, or the folder. A child that the process
        # has forked since would listen at the same address, also after this process's death.
        if spare is not None and self._num_forks == _forks.num and spare.is_untouched:
            return spare
        return trainer_end(self.folder.new_endpoint())

    def prepare(self) -> None:
        """Open the socket of the next session. Call this when this thread would only wait."""
        if self._host is None and self._spare is None:
            self._num_forks = _forks.num
            self._spare = trainer_end(self.folder.new_endpoint())

    @property
    def folder(self) -> SessionFolder:
        self._folder = self._folder or SessionFolder()
        return self._folder


class SentHandles:
    """The handles that one engine rank was given and may still hold, from session to session.

    Attributes:
        elsewhere: handles to drop whose counters are not on this host.
    """

    def __init__(self) -> None:
        self._by_block: dict[str, list[BufferHandle]] = {}
        self._has_new = False  # since the last `keep_only`
        self.elsewhere: list[BufferHandle] = []

    def add(self, block: str, handle: BufferHandle) -> None:
        self._has_new = True
        self._by_block.setdefault(block, []).append(handle)

    def keep_only(self, blocks: Set[str]) -> None:
        """Keep only the last handle of each of these blocks."""
        if not self._has_new and self._by_block.keys() <= blocks:
            return
        self._has_new = False
        # The engine has dropped the others.
        held = self._by_block.items()
        self._by_block = {block: handles[-1:] for block, handles in held if block in blocks}

    def drop_all_but(self, blocks: Collection[str]) -> None:
        """Drop the references of all handles but those of the blocks that the engine maps."""
        # torch keeps memory of a GPU until the receiver of each handle has dropped it. An engine
        # that was killed never does, and one that fails early never maps what was sent to it.
        for block in self._by_block.keys() - set(blocks):
            self.elsewhere += drop_references(self._by_block.pop(block))

    def take_elsewhere(self) -> list[BufferHandle]:
        """Return `elsewhere`, and empty it."""
        taken, self.elsewhere = self.elsewhere, []
        return taken


class TrainerSession:
    """The trainer's part of the protocol, as a context manager.

    Args:
        names: names of this process's memory blocks, the same for all its sessions.
        sent: handles that the engine rank was given, the same for all sessions with it.
        sync: a random text, the same for all sessions of a sync.
        proof: what the session proves.
        group: name of the update group in which buckets are sent. "": the engine maps them.
        senders: name of the update group of all trainer ranks, or "" if there is none.
        secret: the secret of `group`.

    Attributes:
        descriptor: encoded, for the request that opens the session.
        plan: name of the engine's load plan, as of its Hello, or "" if it has none.
        wants_proof: the engine wants a proof, likewise, for a user or for itself.
        dropped_elsewhere: handles that the engine rank holds no more, of trainer ranks on other
            hosts, which must drop them.
        num_loads: number of loads that were requested: buckets, or mapped shards and rounds.
        num_done: number of loads that the engine has done, as of the last `poll`.
        num_receiving: number of loads that the engine has begun to receive, as of the last `poll`.
            Mapped shards count as one. Mapped buckets and mapped rounds do not count.
        rounds: the engine's Rounds, or None before they have come.
        loaded: the engine's Loaded, or None before it has come.
    """

    def __init__(
        self,
        sockets: SessionSockets,
        settings: WeightSyncConfig,
        names: BlockNames,
        sent: SentHandles | None = None,
        *,
        sync: str = "",
        proof: messages.Proof = "none",
        group: str = "",
        senders: str = "",
        secret: bytes = b"",
    ) -> None:
        token = secrets.token_hex(16)
        self._sockets = sockets
        self._channel = sockets.open()
        self._channel.begin(token, timeout_s=settings.request_timeout_s)
        descriptor = SessionDescriptor(
            version=messages.SESSION_VERSION,
            endpoint=self._channel.endpoint,
            token=token,
            sync=sync,
            timeout_s=settings.request_timeout_s,
            uses_plan=settings.uses_plan,
            manifest_check=settings.manifest_check,
            proof=proof,
            syncs_draft=settings.syncs_draft,
            group=group,
            senders=senders,
        )
        self.descriptor = messages.encode_descriptor(
            messages.signed(descriptor, secret) if group else descriptor
        )
        self._watch: Callable[[], None] | None = None
        self._has_committed = False
        self._names = names
        self._sent = sent or SentHandles()
        self._kept: set[str] = set()
        self._mapped: set[str] = set()
        self._slots: dict[str, int] = {}
        self._unsent: list[messages.SharedBuffer] = []
        self._stored: set[str] = set()  # digests of what the engine has stored
        self.num_loads = self.num_done = self.num_receiving = 0
        self.loaded: Loaded | None = None
        self.rounds: messages.Rounds | None = None
        self.plan = ""
        self.wants_proof = False
        self.dropped_elsewhere: list[BufferHandle] = []

    def accept(self, watch: Callable[[], None], *, wait_s: float) -> bool:
        """Exchange Hello and Welcome with the engine.

        Args:
            watch: called during all waits for the engine, here and later. It may raise to end them.

        Returns:
            False if the engine has not joined within `wait_s` seconds.
        """
        self._watch = watch
        if not self._channel.wait(wait_s, watch):
            return False
        hello = self._receive(messages.Hello)
        self._mapped, self._stored = set(hello.buffers), set(hello.stored)
        self.plan, self.wants_proof = hello.plan, hello.wants_proof
        self._sent.drop_all_but(self._mapped)  # left by an engine that died, or a failed session
        self.dropped_elsewhere = self._sent.take_elsewhere()
        # Other engine ranks may join later. Only a proof overwrites weights from Welcome on.
        self._send(messages.Welcome)
        return True

    def map_buffer(self, storage: torch.UntypedStorage, *, keep: bool) -> int:
        """Announce a staging buffer, which the engine maps with the next bucket.

        Args:
            keep: True if the engine keeps the buffer mapped after the session.

        Returns:
            The slot of the buffer.

        Raises:
            ValueError: the buffer cannot be shared.
        """
        block = Block.of(storage)
        name = self._names.name_of(block, storage)
        if name not in self._slots:
            # The engine may have kept the buffer mapped since an earlier session.
            handle = None if name in self._mapped else share_block(block, storage)
            # Recorded before it leaves: others free the memory if this process is killed.
            if handle is not None:
                self._sockets.folder.record(handle)
            self._announce(name, handle, keep=keep)
        return self._slots[name]

    def map_blocks(
        self, names: Sequence[str], handles: Mapping[str, BufferHandle], *, keep: bool
    ) -> None:
        """Announce blocks of the trainer ranks' parameters. The engine maps them by `load_shards`.

        The slot of a block is its position, by which the bases name it.

        Raises:
            BlockNotMapped: the engine has not mapped a block that has no handle.
            SessionError: the session has mapped something else before, or a block comes twice.
        """
        if self._slots or len(set(names)) != len(names):
            raise SessionError(
                f"{len(names)} blocks of parameters cannot have the slots from 0 on: "
                f"{len(self._slots)} are taken, {len(set(names))} have a name of their own"
            )
        if not handles and self._mapped.issuperset(names):  # as in most syncs
            self._slots = dict(zip(names, range(len(names)), strict=True))
            self._unsent = list(_mapped_blocks(tuple(names), keep))
            self._kept = set(names) if keep else set()
            return
        for name in names:
            # A handle of a block that is mapped already is sent, too. Torch frees the memory only
            # when an engine has dropped each handle. A file of host memory has no such count.
            handle = handles.get(name)
            if isinstance(handle, HostHandle) and name in self._mapped:
                handle = None
            if handle is None and name not in self._mapped:
                raise BlockNotMapped(f"the engine has unmapped the parameters' block {name}")
            self._announce(name, handle, keep=keep)

    def _announce(self, name: str, handle: BufferHandle | None, *, keep: bool) -> None:
        """Assign the next slot to a buffer, and send the buffer with the next load."""
        if handle is not None:
            self._sent.add(name, handle)
        if keep:
            self._kept.add(name)
        slot = self._slots[name] = len(self._slots)
        self._unsent.append(messages.SharedBuffer(slot=slot, name=name, handle=handle, keep=keep))

    def load(self, index: int, bucket: Bucket, slot: int) -> None:
        """Request a bucket's load, see `LoadBucket`. Its memory must not change until then."""
        buffers, self._unsent = self._unsent, []
        self.num_loads += 1
        self._send(
            messages.LoadBucket, index=index, buffers=buffers, slot=slot, layout=bucket.encoded
        )

    def load_shards(
        self,
        weight_map: StoredBytes,
        bases: StoredBytes,
        *,
        host: str,
        num_ranks: int,
        round_bytes: int,
        rounds: str | None,
    ) -> None:
        """Request the load of a whole sync, from the blocks that `map_blocks` has announced.

        The parameters must not change until the sync is over.

        Args:
            bases: of the shards of the map, as this engine rank reads them.
            host: see `LoadShards`, as for the other arguments.
        """
        for stored in (weight_map, bases):
            if stored.digest not in self._stored:
                self._send(messages.Store, data=stored.data)
        buffers, self._unsent = self._unsent, []
        self._send(
            messages.LoadShards,
            index=0,
            buffers=buffers,
            host=host,
            weight_map=weight_map.digest,
            bases=bases.digest,
            num_ranks=num_ranks,
            round_bytes=round_bytes,
            rounds=rounds,
        )
        # The engine sends no Receiving for load 0, the mapped shards. The first Receiving of a
        # round is that of load 1.
        self.num_loads = self.num_receiving = 1

    def load_round(self, *, slot: int = 0, receives: Sequence[int] = ()) -> None:
        """Request the load of the next round, see `LoadRound`."""
        buffers, self._unsent = self._unsent, []
        self._send(
            messages.LoadRound,
            index=self.num_loads,
            buffers=buffers,
            slot=slot,
            receives=list(receives),
        )
        self.num_loads += 1

    def poll(self) -> None:
        """Process the engine's messages without waiting.

        Raises:
            EngineFailed: with the engine's traceback.
            SessionError: the engine is gone or broke the protocol.
            Exception: what the watch of `accept` or `commit` raised.
        """
        while self._channel.wait(0.0, self._watch):
            message = self._next()
            if isinstance(message, messages.Receiving):
                self.num_receiving = _counted(message, self.num_receiving)
            elif isinstance(message, messages.Rounds):
                self.rounds = message
            elif isinstance(message, Loaded):
                self.loaded = message
            else:
                self.num_done = _counted(_expected(messages.LoadDone, message), self.num_done)

    def wait_briefly(self) -> None:
        self._channel.wait_briefly()

    def finish(self, *, num_tensors: int) -> None:
        """Report that everything was announced, see `Finish`."""
        self._send(
            messages.Finish,
            num_loads=self.num_loads,
            num_tensors=num_tensors,
        )

    def commit(self, watch: Callable[[], None], *, is_last: bool) -> None:
        """Publish the weights, after all engine ranks have read all buckets.

        Args:
            watch: replaces that of `accept`: from now on a good reply may come at any time.
            is_last: False: no request may run until the sync's next session has ended.
        """
        # Noted before the sending, which may fail though the Commit arrives.
        self._watch, self._has_committed = watch, True
        self._send(messages.Commit, is_last=is_last)

    def wait_until_published(self) -> None:
        """Wait until the engine rank has published. Raise as `poll` does."""
        self._receive(messages.Published)

    def abort(self, reason: str, watch: Callable[[], None] | None) -> None:
        """Abort the session, and wait up to `ABORT_WAIT_S` for an engine that has not joined yet.

        Args:
            watch: called while waiting. It may raise to end the wait. None: no engine was asked to
                join.
        """
        if not self._channel.has_heard and watch is None:
            return
        # An engine that joins later would wait for buckets until its time limit.
        with suppress(Exception):  # the engine is gone
            if self._channel.has_heard or self._channel.wait(ABORT_WAIT_S, watch):
                self._channel.send(messages.Abort, reason=reason)

    def _send(self, kind: type[Any], **fields: Any) -> None:
        """Send a message. If the engine is gone, raise the failure that it has sent before."""
        try:
            self._channel.send(kind, **fields)
        except SessionError:
            while self._channel.has_message():
                message = self._channel.receive()
                if isinstance(message, messages.Failed):
                    raise _failure(message) from None
            raise

    def _receive(self, kind: type[Message]) -> Message:
        return _expected(kind, self._next())

    def _next(self) -> FromEngine:
        message = self._channel.receive(watch=self._watch)
        if isinstance(message, messages.Failed):
            raise _failure(message)
        return message

    def __enter__(self) -> TrainerSession:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self._sent.keep_only(self._kept)
        elif self._channel.is_peer_gone and not self._has_committed:
            # The engine is dead, or has unmapped everything. After a commit it may hold what it
            # was to keep: the Hello of its next session says so.
            self._sent.drop_all_but(())
        self._channel.close()


@lru_cache(maxsize=128)
def _mapped_blocks(names: tuple[str, ...], keep: bool) -> list[messages.SharedBuffer]:
    """Return the announcement of blocks that the engine has mapped: hundreds, in most syncs."""
    return [
        messages.SharedBuffer(slot=slot, name=name, handle=None, keep=keep)
        for slot, name in enumerate(names)
    ]


def _expected(kind: type[Message], message: FromEngine) -> Message:
    if not isinstance(message, kind):
        raise SessionError(f"expected {kind.__name__}, got {type(message).__name__}")
    return message


def _counted(message: messages.Receiving | messages.LoadDone, number: int) -> int:
    """Check that the message is for load `number`, and return the next number."""
    if message.index != number:
        name = type(message).__name__
        raise SessionError(f"expected {name} of load {number}, got that of {message.index}")
    return number + 1


def _failure(message: messages.Failed) -> EngineFailed:
    kinds = {
        "cannot_map": EngineCannotMap,
        "differs": ProofFailed,
        "saved_plan_differs": SavedPlanFailed,
        "misfit": Misfit,
    }
    return kinds.get(message.failure, EngineFailed)(message.traceback)
