"""What an engine process keeps between sessions, and what is in flight within one.

Mapped buffers outlive a session, so that a later one need not map them again.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping

import torch

from sglang_loader.common.bucket_source import BucketSource, Piece
from sglang_loader.common.copies import synchronize
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.compose import ByteMap
from sglang_loader.common.session import messages as wire
from sglang_loader.common.session.messages import SessionError
from sglang_loader.common.shared_memory import map_buffer

MAX_SOURCES = 4096


class MappedMemory:
    """How a session's buckets come that lie in the trainer's memory: this process maps it.

    It serves one session after the other: `begin_session` comes first, `let_go` last. A buffer is
    mapped by name, and unmapped with the session unless that asks to keep it. Its other methods are
    those of `BroadcastReceiver`: a session begins to get buckets, at most `max_unread` of which can
    be unread, and reads them in order.
    """

    max_unread = sys.maxsize  # the trainer knows how many buffers it has

    def __init__(self) -> None:
        self._mapped: dict[str, torch.Tensor] = {}
        self._kept: set[str] = set()
        self._slots: dict[int, torch.Tensor] = {}
        self._sources = Sources()
        self._device = torch.device("cpu")

    def begin_session(self, device: torch.device) -> MappedMemory:
        """Itself; `device`: of the engine's weights."""
        self._device = device
        return self

    @property
    def names(self) -> list[str]:
        """Of the buffers that are mapped."""
        return list(self._mapped)

    def begin(self, message: wire.LoadBucket, layout: BucketLayout) -> None:
        """Map the buffers that come with the next bucket, or find them mapped.

        Raises:
            SessionError: one is not mapped, and came without a handle.
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

    def has_come(self) -> bool:
        """True: the trainer announces what is there."""
        return True

    def source(self, message: wire.LoadBucket, nbytes: int) -> BucketSource:
        """The memory that a message speaks of: see `Sources.of`."""
        return self._sources.of(message, self._slots, nbytes)

    def let_go(self) -> None:
        """Unmap all that the session did not ask to keep."""
        kept = {name: self._mapped[name] for name in self._kept}
        if len(kept) < len(self._mapped):
            self._sources.clear()
        self._mapped, self._kept, self._slots = kept, set(), {}


_CachedSource = tuple[list[wire.BucketPiece], dict[int, torch.Tensor], BucketSource]
"""The pieces of a message, the buffers that they lie in, and their memory."""


class Sources:
    """The memory behind the last buckets: one may have thousands of pieces, and plans bind their
    copies to it.
    """

    def __init__(self) -> None:
        self._cached: OrderedDict[tuple[int, int, bytes], _CachedSource] = OrderedDict()

    def of(
        self, message: wire.LoadBucket, slots: Mapping[int, torch.Tensor], nbytes: int
    ) -> BucketSource:
        """The memory that a message speaks of; `nbytes`: of the bucket, as it came.

        Raises:
            SessionError: a piece lies in no buffer, or leaves it or the bucket.
        """
        slot = message.pieces[0].slot if message.pieces else -1
        key = len(message.pieces), slot, message.layout
        if (cached := self._cached.get(key)) is not None:
            pieces, used, source = cached
            is_there = all(slots.get(slot) is buffer for slot, buffer in used.items())
            if is_there and pieces == message.pieces:
                return source
        used = {}
        for piece in message.pieces:
            for slot in (piece.slot, *(slot for slot, _, _ in piece.shards)):
                if slot not in slots:
                    raise SessionError(f"bucket {message.index} lies in slot {slot}: not mapped")
                used[slot] = slots[slot]
        found = [_piece(piece, used, nbytes, message.index) for piece in message.pieces]
        self._cached[key] = message.pieces, used, BucketSource(found)
        while len(self._cached) > MAX_SOURCES:
            self._cached.popitem(last=False)
        return self._cached[key][2]

    def clear(self) -> None:
        """Let go of all memory."""
        self._cached.clear()


def _piece(
    piece: wire.BucketPiece, buffers: Mapping[int, torch.Tensor], bucket_nbytes: int, index: int
) -> Piece:
    def within(slot: int, offset: int, nbytes: int) -> torch.Tensor:
        buffer = buffers[slot]
        if offset + nbytes > buffer.numel():
            raise SessionError(f"a shard of bucket {index} leaves the buffer of {buffer.numel()}")
        return buffer[offset : offset + nbytes]

    shards = tuple(within(*shard) for shard in piece.shards) or (buffers[piece.slot],)
    found = Piece(piece.start, shards, ByteMap(piece.offset, piece.dims or ((piece.nbytes, 1),)))
    if found.nbytes != piece.nbytes or not found.is_within:
        raise SessionError(f"a piece of bucket {index} at byte {piece.start} leaves its memory")
    if piece.start + piece.nbytes > bucket_nbytes:
        raise SessionError(f"a piece of bucket {index} leaves the bucket's {bucket_nbytes} bytes")
    return found


class InFlight:
    """Buckets that were launched, in order; the device may still be reading them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launched: deque[tuple[int, torch.cuda.Event | None]] = deque()

    def __len__(self) -> int:
        return len(self._launched)

    def add(self, index: int, *, on_current_stream: bool) -> None:
        """Note a launched bucket; a loader that may use other streams is waited for at once."""
        event = None
        if self._device.type == "cuda" and on_current_stream:
            event = torch.cuda.Event()
            event.record()
        else:
            synchronize(self._device)
        self._launched.append((index, event))

    def finished(self) -> Iterator[int]:
        """Let go of the oldest buckets with which the device is done; yields their indices."""
        while self._launched:
            index, event = self._launched[0]
            if event is not None and not event.query():
                return
            self._launched.popleft()
            yield index
