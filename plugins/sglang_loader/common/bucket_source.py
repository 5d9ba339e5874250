"""The places of a bucket's bytes: in one flat buffer, or in shards of the trainer's parameters.

A layout gives every tensor an offset, as if the bucket were one buffer. A `BucketMap` maps the
bytes of that buffer to bytes of numbered memories. A `BucketSource` has these memories:

    bucket_map = BucketMap([BucketPiece(0, 0, 0, 4096), BucketPiece(1, 0, 4096, 512)])
    source = BucketSource(bucket_map, {0: mapped, 1: other})
    for copy, slot in bucket_map.copies(bucket_copy): ...

Parameters that were offloaded come back in other memory with the same layout. They need another
source and the same map. A piece may end within a tensor, where a shard ends. The bytes of one
tensor may also be spread over shards, like the bytes of a row-parallel weight.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

import msgspec
import torch
from msgspec.structs import replace

from sglang_loader.common.copies.strided import copy_views
from sglang_loader.common.layout import BucketLayout, check_buffer
from sglang_loader.common.regions.compose import ByteMap, shard_copies
from sglang_loader.common.regions.geometry import StridedCopy, split_copy
from sglang_loader.common.regions.read import Size

CopyFrom: TypeAlias = tuple[StridedCopy, int]
"""A copy, and the number of the memory in which its `src` is an offset."""


class BucketPiece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Consecutive bytes of a bucket, and their places in numbered memories.

    Attributes:
        slot: the memory.
        offset: offset of the first byte in that memory, or in the concatenated `shards`.
        start: offset of the first byte in the bucket's layout.
        nbytes: length.
        dims: `(count, stride in bytes)`, outermost first, as in `ByteMap`, or () if the bytes are
            consecutive.
        shards: `(slot, offset, length)` of parts of memories that the bytes are spread over, none
            empty, the first in `slot`, or () if the bytes are in one memory.
    """

    slot: Size
    offset: Size
    start: Size
    nbytes: Size
    dims: tuple[tuple[Size, Size], ...] = ()
    shards: tuple[tuple[Size, Size, Size], ...] = ()

    @property
    def bytes(self) -> ByteMap:
        """The places of the piece's bytes in the memory, or in the concatenated shards."""
        return ByteMap(self.offset, self.dims or ((self.nbytes, 1),))


class BucketMap:
    """The pieces of one bucket, by ascending `start`.

    Maps are compared by identity. A map is the key of results that are computed from the map, for
    as long as the map lives.

    Attributes:
        nbytes: end of the last piece.
        needs: by slot, the size that a memory must have for the pieces to lie in it.

    Raises:
        ValueError: pieces overlap or are out of order, or a piece does not fit its length or
            shards.
    """

    def __init__(self, pieces: Sequence[BucketPiece]) -> None:
        self.nbytes = 0
        self.needs: dict[int, int] = {}
        for piece in pieces:
            if piece.start < self.nbytes:
                raise ValueError(
                    f"a piece starts at byte {piece.start}, its predecessor ends at {self.nbytes}"
                )
            self.nbytes = piece.start + piece.nbytes
            shards: Sequence[tuple[int, int, int]] = ((piece.slot, piece.offset, piece.nbytes),)
            if piece.dims or piece.shards:
                # The bytes must lie in the memory, or in the concatenated shards.
                places = piece.bytes
                shards = piece.shards or ((piece.slot, 0, places.stop),)
                room = sum(nbytes for _, _, nbytes in shards)
                if places.nbytes != piece.nbytes or places.stop > room:
                    raise ValueError(f"the piece at byte {piece.start} leaves its memory")
            for slot, offset, nbytes in shards:
                self.needs[slot] = max(self.needs.get(slot, 0), offset + nbytes)
        self.pieces = tuple(pieces)
        self._starts = [piece.start for piece in pieces]

    def copies(self, copy: StridedCopy) -> Iterator[CopyFrom]:
        """Yield copies from the memories for a copy from the bucket.

        Raises:
            ValueError: some of its bytes are in no piece, or a shard ends within one of its units.
        """
        # Each part reads from one piece only. Bytes between two pieces are in none.
        for part in split_copy(copy, self._starts):
            start, stop = part.src_bounds()
            i = bisect_right(self._starts, start) - 1
            if i < 0 or stop > self.pieces[i].start + self.pieces[i].nbytes:
                raise ValueError(f"bytes {start} to {stop} of the bucket are in no piece")
            piece = self.pieces[i]
            if piece.dims or piece.shards:
                yield from _from_piece(piece, replace(part, src=start - piece.start))
            else:  # the usual case
                yield replace(part, src=piece.offset + start - piece.start), piece.slot


def _from_piece(piece: BucketPiece, copy: StridedCopy) -> Iterator[CopyFrom]:
    """Yield copies from the memories for a copy whose `src` is an offset in the piece."""
    shards = piece.shards or ((piece.slot, 0, sys.maxsize),)
    starts = list(accumulate((nbytes for _, _, nbytes in shards), initial=0))[:-1]
    for shard, part in shard_copies(piece.bytes, starts, copy):
        slot, offset, nbytes = shards[shard]
        if part.src_bounds()[1] > nbytes:
            raise ValueError(f"a shard of {nbytes} bytes ends within {copy.unit}")
        yield (replace(part, src=offset + part.src) if offset else part), slot


class BucketSource:
    """The memories in which one bucket lies. Copies that are bound to them hold this object.

    Args:
        memories: by the slots of the map's pieces, each flat contiguous uint8.

    Raises:
        ValueError: a memory is not flat contiguous uint8.
    """

    def __init__(self, bucket_map: BucketMap, memories: Mapping[int, torch.Tensor]) -> None:
        for memory in memories.values():
            check_buffer(memory, 0)
        self.map = bucket_map
        self.memories = dict(memories)

    @classmethod
    def flat(cls, buffer: torch.Tensor) -> BucketSource:
        """Make the source of a bucket in one buffer, flat contiguous uint8."""
        return cls(BucketMap([BucketPiece(0, 0, 0, buffer.numel())]), {0: buffer})

    @property
    def device(self) -> torch.device:
        """The device of the first memory, or the CPU if there is none."""
        return next((memory.device for memory in self.memories.values()), torch.device("cpu"))

    def packed(self, layout: BucketLayout) -> torch.Tensor:
        """Return the bucket as one buffer: the source's own memory if possible, else a copy.

        Raises:
            ValueError: the source does not hold every byte of every tensor of the layout.
        """
        nbytes = layout.nbytes
        if len(self.map.pieces) == 1:
            (piece,) = self.map.pieces
            is_flat = not piece.dims and not piece.shards
            if is_flat and piece.start == 0 and piece.nbytes >= nbytes:
                return self.memories[piece.slot][piece.offset :][:nbytes]
        # Otherwise the tensors are copied one by one. Only eager loads come here.
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        for tensor in layout.tensors:
            whole = StridedCopy(0, tensor.offset, tensor.offset, (), tensor.nbytes)
            for copy, slot in self.map.copies(whole) if tensor.nbytes else ():
                target, origin = copy_views(copy, self.memories[slot], buffer)
                target.copy_(origin)
        return buffer
