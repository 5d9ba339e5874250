"""The trainer's memory as an engine process maps it, and the places of a session's buckets in it.

Mapped buffers outlive a session, so that a later session need not map them again.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from sglang_loader.common.bucket_source import BucketMap, BucketSource
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.session import messages as wire
from sglang_loader.common.session.messages import SessionError
from sglang_loader.common.shared_memory import map_buffer

MAX_SOURCES = 2
"""Cached sources for each bucket, which comes packed from the export or as pieces of parameters."""


class MappedMemory:
    """Buffers of the trainer that this process maps, from which it reads buckets in place.

    An object serves one session after the other. `begin_session` comes first, `release` last. A
    buffer is mapped by name. At the end of a session the buffer is unmapped, unless the trainer
    asked to keep it mapped. `GroupReceiver` has the same methods: a session begins up to
    `max_unread` buckets before it has read them, and reads the buckets in order.
    """

    max_unread = sys.maxsize  # the trainer counts its buffers

    def __init__(self) -> None:
        self._mapped: dict[str, torch.Tensor] = {}
        self._kept: set[str] = set()
        self._slots: dict[int, torch.Tensor] = {}
        self._sources = SourceCache()
        self._device = torch.device("cpu")

    def begin_session(self, device: torch.device) -> MappedMemory:
        """Begin a session, and return this object. `device` is that of the engine's weights."""
        self._device = device
        return self

    @property
    def names(self) -> list[str]:
        return list(self._mapped)

    def begin_bucket(self, message: wire.LoadBucket, layout: BucketLayout) -> None:
        """Map the buffers of the next bucket that are not mapped yet.

        Raises:
            SessionError: a buffer is not mapped, and its message has no handle.
            CannotMap: see `map_buffer`.
        """
        for buffer in message.buffers:
            name = buffer.name
            if buffer.handle is not None:
                self._mapped[name] = map_buffer(buffer.handle, self._device)
            if name not in self._mapped:
                raise SessionError(f"buffer {name} is not mapped, and no handle came with it")
            if buffer.keep:
                self._kept.add(name)
            self._slots[buffer.slot] = self._mapped[name]

    def has_arrived(self) -> bool:
        """Return True: the trainer announces a bucket when its bytes are in place."""
        return True

    def source(self, message: wire.LoadBucket, nbytes: int) -> BucketSource:
        """Return the source of a bucket, as `SourceCache.of` does."""
        return self._sources.of(message, self._slots, nbytes)

    def release(self) -> None:
        """Unmap the buffers that the session did not ask to keep."""
        kept = {name: self._mapped[name] for name in self._kept}
        if len(kept) < len(self._mapped):
            self._sources.clear()
        self._mapped, self._kept, self._slots = kept, set(), {}

    def release_all(self) -> None:
        """Unmap every buffer, also those that the trainer asked to keep."""
        self._kept.clear()
        self.release()


class SourceCache:
    """The bucket sources of earlier syncs, by the bucket's index.

    The same pieces give the same `BucketMap`. The same pieces in the same memory give the same
    `BucketSource`. A bucket may have thousands of pieces, and load plans bind their copies to its
    map and source.
    """

    def __init__(self) -> None:
        self._by_index: defaultdict[int, deque[_CachedSource]] = defaultdict(
            partial(deque, maxlen=MAX_SOURCES)
        )

    def of(
        self, message: wire.LoadBucket, slots: Mapping[int, torch.Tensor], nbytes: int
    ) -> BucketSource:
        """Return the source of the bucket that a message announces.

        Args:
            slots: the buffers of this session, by slot.
            nbytes: size of the bucket, arranged or whole.

        Raises:
            SessionError: a piece lies in no buffer, or exceeds the buffer or the bucket.
        """
        entries = self._by_index[message.index]
        entry = next((entry for entry in entries if entry.pieces == message.pieces), None)
        if entry is None:
            entry = _CachedSource(message.pieces, _map_of(message))
            entries.append(entry)
        # Nothing may read outside of the mapped buffers, or write outside of the bucket.
        for slot, needed in entry.map.needs.items():
            if slot not in slots:
                raise SessionError(f"bucket {message.index} lies in slot {slot}: not mapped")
            if slots[slot].numel() < needed:
                raise SessionError(
                    f"bucket {message.index} leaves its memory: it needs {needed} bytes of slot "
                    f"{slot}, whose buffer has {slots[slot].numel()}"
                )
        if entry.map.nbytes > nbytes:
            raise SessionError(
                f"a piece of bucket {message.index} leaves the bucket's {nbytes} bytes"
            )
        # The same memory gives the same source, to which plans have bound their copies.
        memories = {slot: slots[slot] for slot in entry.map.needs}
        source = entry.source
        if source is None or any(source.memories[slot] is not memories[slot] for slot in memories):
            source = entry.source = BucketSource(entry.map, memories)
        return source

    def clear(self) -> None:
        """Drop the references to all memory."""
        for entry in chain.from_iterable(self._by_index.values()):
            entry.source = None


@dataclass
class _CachedSource:
    """The encoded pieces of a message, and the map and the last source made of them."""

    pieces: bytes
    map: BucketMap
    source: BucketSource | None = None


def _map_of(message: wire.LoadBucket) -> BucketMap:
    try:
        pieces = wire.decode(wire.PIECES, message.pieces)
        return BucketMap(pieces)
    except ValueError as error:
        raise SessionError(f"bucket {message.index}: {error}") from None
