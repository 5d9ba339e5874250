"""What an engine process keeps between sessions, and what is in flight within one.

Mapped buffers outlive a session, so that a later one need not map them again.
"""

from __future__ import annotations

import operator
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import torch

from sglang_loader.common.bucket_source import BucketMap, BucketSource, Piece
from sglang_loader.common.copies import synchronize
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.compose import ByteMap
from sglang_loader.common.session import messages as wire
from sglang_loader.common.session.messages import SessionError
from sglang_loader.common.shared_memory import map_buffer

MAX_LAYOUTS = 4096
MAX_WAYS = 2
"""In which a bucket comes that are remembered: exported in full, and without the export."""


class MappedMemory:
    """How a session's buckets come that lie in the trainer's memory: this process maps it.

    It serves one session after the other: `begin_session` comes first, `release` last. A buffer is
    mapped by name, and unmapped with the session unless that asks to keep it. Its other methods are
    those of `GroupReceiver`: a session begins to get buckets, at most `max_unread` of which can
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

    def release(self) -> None:
        """Unmap all that the session did not ask to keep."""
        kept = {name: self._mapped[name] for name in self._kept}
        if len(kept) < len(self._mapped):
            self._sources.clear()
        self._mapped, self._kept, self._slots = kept, set(), {}


class Sources:
    """The memory behind the last buckets: one may have thousands of pieces, and plans bind their
    copies to it. Where only the memory is another, the map of the pieces is kept, and what plans
    have found out of that.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, deque[_KnownPieces]] = OrderedDict()  # by layout

    def of(
        self, message: wire.LoadBucket, slots: Mapping[int, torch.Tensor], nbytes: int
    ) -> BucketSource:
        """The memory that a message speaks of; `nbytes`: of the bucket, as it came.

        Raises:
            SessionError: a piece lies in no buffer, or leaves it or the bucket.
        """
        ways = self._known.setdefault(message.layout, deque(maxlen=MAX_WAYS))
        found = next((known for known in ways if known.is_of(message.pieces, slots)), None)
        if found is None:
            found = _KnownPieces.of(message, slots, nbytes)
            ways.append(found)
            while len(self._known) > MAX_LAYOUTS:
                self._known.popitem(last=False)
        memories = [slots[slot] for slot in found.slots]
        source = found.source
        if source is None or any(map(operator.is_not, source.memories, memories)):
            source = found.source = BucketSource(found.map, memories)
        return source

    def clear(self) -> None:
        """Let go of all memory."""
        for known in chain.from_iterable(self._known.values()):
            known.source = None


@dataclass
class _KnownPieces:
    """The pieces of a message, the slots and lengths of the buffers that they lie in, their map in
    these, and the buffers that were the last.
    """

    pieces: bytes
    slots: dict[int, int]
    map: BucketMap
    source: BucketSource | None = None

    @classmethod
    def of(
        cls, message: wire.LoadBucket, buffers: Mapping[int, torch.Tensor], nbytes: int
    ) -> _KnownPieces:
        pieces, numbers = wire.decode_pieces(message.pieces), dict[int, int]()
        for piece in pieces:
            for slot in (piece.slot, *(slot for slot, _, _ in piece.shards)):
                if slot not in buffers:
                    raise SessionError(f"bucket {message.index} lies in slot {slot}: not mapped")
                numbers.setdefault(slot, len(numbers))
        sizes = {slot: buffers[slot].numel() for slot in numbers}
        found = [_piece(piece, numbers, sizes, nbytes, message.index) for piece in pieces]
        return cls(message.pieces, sizes, BucketMap(found))

    def is_of(self, pieces: bytes, buffers: Mapping[int, torch.Tensor]) -> bool:
        """True if these are the pieces, in buffers of the same lengths."""
        if pieces != self.pieces:
            return False
        return all(s in buffers and buffers[s].numel() == n for s, n in self.slots.items())


def _piece(
    piece: wire.BucketPiece,
    numbers: Mapping[int, int],
    sizes: Mapping[int, int],
    bucket_nbytes: int,
    index: int,
) -> Piece:
    shards = piece.shards or ((piece.slot, 0, sizes[piece.slot]),)
    for slot, offset, length in shards:
        if offset + length > sizes[slot]:
            raise SessionError(f"a shard of bucket {index} leaves the buffer of {sizes[slot]}")
    found = Piece(
        piece.start,
        tuple((numbers[slot], offset, length) for slot, offset, length in shards),
        ByteMap(piece.offset, piece.dims or ((piece.nbytes, 1),)),
    )
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
