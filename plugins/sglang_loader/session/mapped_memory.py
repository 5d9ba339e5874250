"""The trainer's memory as an engine process maps it, and what a session's loads read there.

Blocks of parameters may stay mapped after a session, so that a later one need not map them again.
The weight map of a pulled sync and its bases are stored likewise.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from sglang_loader.common.bucket_source import BucketMap, BucketPiece, BucketSource
from sglang_loader.common.host_memory import HostHandle
from sglang_loader.common.layout import WireError, digest_of
from sglang_loader.common.session import messages
from sglang_loader.common.session.messages import SessionError
from sglang_loader.common.shared_memory import map_buffer
from sglang_loader.common.weight_map import (
    ShardMemory,
    WeightMap,
    decode_bases,
    decode_weight_map,
)


class MappedMemory:
    """Buffers of the trainer that this process maps, from which it reads buckets or shards.

    An object serves one session after the other. A session calls `begin_session` first, and
    `release` last. Buffers are mapped by name. `release` unmaps each buffer that the trainer did
    not ask to keep. A file of host memory takes seconds to pin, so one session without it, such as
    a proof by export, leaves it mapped.

    A session uses a `GroupReceiver` in the same way. A session reads its loads in order. At most
    `max_unread` loads are begun and not yet read to the end.
    """

    max_unread = sys.maxsize  # the trainer counts its buffers

    def __init__(self) -> None:
        self._mapped: dict[str, torch.Tensor] = {}
        self._kept: set[str] = set()
        self._files: set[str] = set()  # the buffers that are files of host memory
        self._left: set[str] = set()  # the files that the last session did not ask to keep
        self._slots: dict[int, torch.Tensor] = {}
        self._sources = SourceCache()
        self._stored: dict[str, bytes] = {}
        self._weight_map: tuple[str, WeightMap] | None = None  # with its digest
        self._shards: ShardMemory | None = None  # of the last pulled sync
        self._shards_key: tuple[object, ...] = ()  # identifies its map, bases and blocks
        self._device = torch.device("cpu")

    def begin_session(self, device: torch.device) -> MappedMemory:
        """Begin a session, and return this object. `device` is that of the engine's weights."""
        self._device = device
        return self

    @property
    def names(self) -> list[str]:
        return list(self._mapped)

    @property
    def stored(self) -> list[str]:
        """The digests of what is stored."""
        return list(self._stored)

    def store(self, data: bytes) -> None:
        """Store bytes, which the session's LoadShards names by their digest."""
        self._stored[digest_of(data)] = data

    def map_buffers(self, buffers: Sequence[messages.SharedBuffer]) -> None:
        """Map the buffers that came with handles.

        Raises:
            SessionError: a buffer is not mapped, and its message has no handle.
            CannotMap: see `map_buffer`.
        """
        for buffer in buffers:
            name = buffer.name
            if buffer.handle is not None:
                self._mapped[name] = map_buffer(buffer.handle, self._device)
                if isinstance(buffer.handle, HostHandle):
                    self._files.add(name)
            if name not in self._mapped:
                raise SessionError(f"buffer {name} is not mapped, and no handle came with it")
            if buffer.keep:
                self._kept.add(name)
            self._slots[buffer.slot] = self._mapped[name]

    def has_arrived(self) -> bool:
        """Return True: the trainer announces a bucket when its bytes are in place."""
        return True

    def source(self, message: messages.LoadBucket, nbytes: int) -> BucketSource:
        """Return the source of a bucket, as `SourceCache.of` does."""
        return self._sources.of(message.index, self.buffer(message), nbytes)

    def buffer(self, message: messages.LoadBucket | messages.LoadRound) -> torch.Tensor:
        """Return the staging buffer of a bucket or of a round.

        Raises:
            SessionError: the buffer is not mapped.
        """
        if message.slot not in self._slots:
            raise SessionError(f"load {message.index} lies in slot {message.slot}: not mapped")
        return self._slots[message.slot]

    def weight_map(self, message: messages.LoadShards) -> WeightMap:
        """Return the weight map that a message names. The same digest gives the same object.

        Raises:
            SessionError: the map was not stored, or is not one.
        """
        digest = message.weight_map
        if self._weight_map is None or self._weight_map[0] != digest:
            try:
                self._weight_map = digest, decode_weight_map(self._data(digest))
            except WireError as error:
                raise SessionError(str(error)) from None
        return self._weight_map[1]

    def shards(self, message: messages.LoadShards) -> ShardMemory:
        """Return the shards that a message names, whose blocks are mapped. Drop all else stored.

        Raises:
            SessionError: bytes were not stored, or a shard leaves its block.
        """
        weight_map = self.weight_map(message)
        blocks = [self._slots[buffer.slot] for buffer in message.buffers]
        # A block that was mapped anew is another tensor, at another address.
        key = message.weight_map, message.bases, *map(id, blocks)
        # The same memory gives the same object, to which load plans have bound their copies.
        if self._shards is None or self._shards_key != key:
            try:
                shards = ShardMemory(
                    weight_map, decode_bases(self._data(message.bases)), blocks, self._device
                )
            except WireError as error:
                raise SessionError(str(error)) from None
            self._shards, self._shards_key = shards, key
        named = message.weight_map, message.bases
        self._stored = {digest: self._data(digest) for digest in named}
        return self._shards

    def _data(self, digest: str) -> bytes:
        if digest not in self._stored:
            raise SessionError(f"bytes {digest} were not stored")
        return self._stored[digest]

    def release(self) -> None:
        """Unmap the buffers that the session did not ask to keep.

        Files of host memory are unmapped by the second session that does not ask for them.
        """
        self._left = self._files - self._kept - self._left
        kept, self._kept, self._slots = self._kept | self._left, set(), {}
        self._files &= kept
        if kept == self._mapped.keys():
            return
        self._sources.clear()
        self._mapped = {name: self._mapped[name] for name in kept}
        is_kept = set(map(id, self._mapped.values()))
        if self._shards is not None and any(id(b) not in is_kept for b in self._shards.blocks):
            self._shards = None

    def release_all(self) -> None:
        """Unmap every buffer, also those that the trainer asked to keep."""
        self._kept.clear()
        self._files.clear()
        self.release()


class SourceCache:
    """The bucket sources of earlier syncs, by the bucket's index.

    A bucket of the same size has the same `BucketMap`. In the same memory it has the same
    `BucketSource`. Load plans bind their copies to both.
    """

    def __init__(self) -> None:
        self._by_index: dict[int, tuple[BucketMap, BucketSource | None]] = {}

    def of(self, index: int, buffer: torch.Tensor, nbytes: int) -> BucketSource:
        """Return the source of a bucket that begins at the first byte of a buffer.

        Raises:
            SessionError: the buffer is smaller than the bucket.
        """
        if buffer.numel() < nbytes:
            raise SessionError(
                f"load {index} leaves its memory: it has {nbytes} bytes, the buffer "
                f"{buffer.numel()}"
            )
        known, source = self._by_index.get(index, (None, None))
        if known is None or known.nbytes != nbytes:
            known, source = BucketMap([BucketPiece(0, 0, 0, nbytes)]), None
        if source is None or source.memories[0] is not buffer:
            source = BucketSource(known, {0: buffer})
        self._by_index[index] = known, source
        return source

    def clear(self) -> None:
        """Drop the references to all memory."""
        self._by_index = {index: (known, None) for index, (known, _) in self._by_index.items()}
