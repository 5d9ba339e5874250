"""The trainer rank's end of a session with the engine rank on its device.

with TrainerSession(folder, settings) as session:
    ...                                   # session.invitation travels with the HTTP request
    while not session.greet(watch, wait_s=1): ...
    session.map_buffer(0, handle)
    session.load(0, bucket, slot=0)
    session.wait_until_done(0)
    outcome = session.commit(num_buckets=1, num_tensors=3)
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sglang_loader import session_messages as wire
from sglang_loader.session_channel import Channel
from sglang_loader.session_messages import Committed, FromEngine, SessionDescriptor, SessionError
from sglang_loader.shared_buffer import share_storage
from verl_sglang_sync.bucket_stream import Bucket
from verl_sglang_sync.config import WeightSyncConfig

Message = TypeVar("Message", bound=wire.FromEngine)

MAX_ENDPOINT_CHARS = 100  # a UNIX socket's path has 107


class EngineFailed(RuntimeError):
    """The engine could not load; the text is its TP rank and traceback."""


class SocketFolder:
    """A private folder (mode 0700) for the sockets of this process's sessions."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._num_sockets = 0

    def endpoint(self) -> str:
        """A new address."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="weight-sync-")
            if len(self._folder.name) > MAX_ENDPOINT_CHARS - 20:  # a long TMPDIR
                self._folder.cleanup()
                self._folder = tempfile.TemporaryDirectory(prefix="weight-sync-", dir="/tmp")
        self._num_sockets += 1
        return f"ipc://{self._folder.name}/{self._num_sockets}"


class BufferNames:
    """Names the storages that sessions share: one name for one allocation."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], tuple[str, StorageWeakRef]] = {}

    def name_of(self, storage: torch.UntypedStorage) -> str:
        """The name of this storage at its present address."""
        key = (storage.data_ptr(), storage.nbytes())
        name, ref = self._names.get(key, ("", None))
        mine = StorageWeakRef(storage)
        if ref is None or ref.cdata != mine.cdata:  # a weak reference keeps its address taken
            self._forget_expired()
            name = secrets.token_hex(8)
            self._names[key] = (name, mine)
        return name

    def _forget_expired(self) -> None:
        self._names = {k: v for k, v in self._names.items() if not v[1].expired()}


class TrainerSession:
    """Speaks the trainer's part of the protocol. A context manager.

    Args:
        endpoint: free zmq address in a private folder.
        settings: the preset.
        names: of this process's buffers, the same for all its sessions.
    """

    def __init__(self, endpoint: str, settings: WeightSyncConfig, names: BufferNames) -> None:
        self._endpoint = endpoint
        token = secrets.token_hex(16)
        self.invitation = wire.encode_descriptor(
            SessionDescriptor(
                version=wire.SESSION_VERSION,
                endpoint=endpoint,
                token=token,
                timeout_s=settings.request_timeout_s,
                recheck_every_n_syncs=settings.recheck_every_n_syncs,
                keep_mappings=settings.keep_staging_buffers,
            )
        )
        self._channel: Channel[FromEngine] = Channel(
            endpoint,
            bind=True,
            token=token,
            timeout_s=settings.request_timeout_s,
            decode=wire.decode_from_engine,
            peer="engine",
        )
        self._watch: Callable[[], None] | None = None
        self._names = names
        self._known: set[str] = set()
        self._mapped: set[str] = set()
        self._slots: dict[str, int] = {}
        self._num_done = 0

    def greet(self, watch: Callable[[], None], *, wait_s: float) -> bool:
        """Meet the engine; False if it has not joined within `wait_s`: call again.

        Args:
            watch: called while waiting for the engine, here and later; raises to end the wait.
            wait_s: in seconds.
        """
        self._watch = watch
        if not self._channel.wait(wait_s, watch):
            return False
        hello = self._receive(wire.Hello)
        self._known, self._mapped = set(hello.layouts), set(hello.buffers)
        self._channel.send(wire.Welcome)
        return True

    def map(self, storage: torch.UntypedStorage) -> int:
        """Have the engine map a storage, once; return its slot.

        Raises:
            ValueError: the storage cannot be shared.
        """
        name = self._names.name_of(storage)
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = len(self._slots)
            handle = None if name in self._mapped else share_storage(storage)
            self._channel.send(wire.MapBuffer, slot=slot, buffer=name, handle=handle)
        return slot

    def load(
        self, index: int, bucket: Bucket, *, slot: int, offset: int = 0, read_only: bool = False
    ) -> None:
        """Have a bucket loaded; its buffer must stay as it is until it is done."""
        is_known = bucket.digest in self._known
        self._channel.send(
            wire.LoadBucket,
            index=index,
            slot=slot,
            offset=offset,
            digest=bucket.digest,
            layout=None if is_known else bucket.encoded,
            read_only=read_only,
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

    def commit(self, *, num_buckets: int, num_tensors: int) -> Committed:
        """Declare the sync complete; the engine checks the counts."""
        self._channel.send(wire.Commit, num_buckets=num_buckets, num_tensors=num_tensors)
        return self._receive(wire.Committed)

    def abort(self, reason: str) -> None:
        """Tell the engine to give up, if it still listens."""
        with suppress(SessionError):
            self._channel.send(wire.Abort, reason=reason)

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
        self._channel.close()
        Path(self._endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
