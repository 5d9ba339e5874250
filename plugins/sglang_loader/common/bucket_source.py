"""Where the bytes of a bucket are: in one flat buffer, or in pieces of the trainer's own memory.

A layout gives every tensor an offset, as if the bucket were one buffer. If the trainer's tensors
are read in place, a `BucketMap` maps the bytes of that buffer to bytes of memories in numbered
slots, and a `BucketSource` has these memories:

    bucket_map = BucketMap([BucketPiece(0, 0, 0, 4096), BucketPiece(1, 0, 4096, 512)])
    source = BucketSource(bucket_map, {0: mapped, 1: other})
    for copy, slot in bucket_map.copies(bucket_copy): ...

Parameters that were offloaded come back in other memory with the same layout: another source, the
same map. A piece may end within a tensor, where a shard ends; or a tensor's bytes are spread over
shards, like those of a row-parallel weight.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeAlias

import torch

from sglang_loader.common.copies.strided import copy_views
from sglang_loader.common.layout import BucketLayout, check_buffer
from sglang_loader.common.regions.compose import shard_copies
from sglang_loader.common.regions.geometry import StridedCopy, split_copy
from sglang_loader.common.session.messages import BucketPiece

CopyFrom: TypeAlias = tuple[StridedCopy, int]
"""A copy, and the number of the memory in which its `src` is an offset."""


class BucketMap:
    """Pieces of one bucket, by ascending `start`. Compared by identity: it is the key of what is
    computed from it, for as long as it lives.

    Attributes:
        nbytes: end of the last piece.
        needs: by slot, how long a memory must be for the pieces to lie in it.

    Raises:
        ValueError: pieces overlap, or are out of order, or one does not fit its length or shards.
    """

    def __init__(self, pieces: Sequence[BucketPiece]) -> None:
        self.nbytes = 0
        self.needs: dict[int, int] = {}
        for piece in pieces:
            if piece.start < self.nbytes:
                raise ValueError(
                    f"a piece starts at byte {piece.start}, the one before it ends at {self.nbytes}"
                )
            self.nbytes = piece.start + piece.nbytes
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
        """Copies from the memories for a copy from the bucket.

        Raises:
            ValueError: some of its bytes are in no piece, or a shard ends within one of its units.
        """
        for part in split_copy(copy, self._starts):
            start, stop = part.src_bounds()
            i = bisect_right(self._starts, start) - 1
            if i < 0 or stop > self.pieces[i].start + self.pieces[i].nbytes:
                raise ValueError(f"bytes {start} to {stop} of the bucket are in no piece")
            yield from _from_piece(self.pieces[i], replace(part, src=start - self.pieces[i].start))


def _from_piece(piece: BucketPiece, copy: StridedCopy) -> Iterator[CopyFrom]:
    """Copies from the memories for a copy whose `src` is an offset in the piece."""
    if not piece.dims and not piece.shards:  # most are: faster than `shard_copies`
        yield replace(copy, src=piece.offset + copy.src), piece.slot
        return
    shards = piece.shards or ((piece.slot, 0, sys.maxsize),)
    starts = list(accumulate((nbytes for _, _, nbytes in shards), initial=0))[:-1]
    for shard, part in shard_copies(piece.bytes, starts, copy):
        slot, offset, nbytes = shards[shard]
        if part.src_bounds()[1] > nbytes:
            raise ValueError(f"a shard of {nbytes} bytes ends within {copy.unit}")
        yield (replace(part, src=offset + part.src) if offset else part), slot


class BucketSource:
    """The memories in which one bucket lies; copies that are bound to them hold this object.

    Args:
        memories: by the slots of the map's pieces, each flat contiguous uint8.

    Raises:
        ValueError: a memory is anything else.
    """

    def __init__(self, bucket_map: BucketMap, memories: Mapping[int, torch.Tensor]) -> None:
        for memory in memories.values():
            check_buffer(memory, 0)
        self.map = bucket_map
        self.memories = dict(memories)

    @classmethod
    def flat(cls, buffer: torch.Tensor) -> BucketSource:
        """The source of a bucket in one buffer, flat contiguous uint8."""
        return cls(BucketMap([BucketPiece(0, 0, 0, buffer.numel())]), {0: buffer})

    @property
    def device(self) -> torch.device:
        """The device of its first memory; the CPU if there is none."""
        return next((each.device for each in self.memories.values()), torch.device("cpu"))

    def packed(self, layout: BucketLayout) -> torch.Tensor:
        """The bucket as one buffer: the source's own memory if that is one, else a copy.

        Raises:
            ValueError: the source does not hold every byte of every tensor of the layout.
        """
        nbytes = layout.nbytes
        if len(self.map.pieces) == 1:
            (piece,) = self.map.pieces
            is_flat = not piece.dims and not piece.shards
            if is_flat and piece.start == 0 and piece.nbytes >= nbytes:
                return self.memories[piece.slot][piece.offset :][:nbytes]
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        for tensor in layout.tensors:
            whole = StridedCopy(0, tensor.offset, tensor.offset, (), tensor.nbytes)
            for copy, slot in self.map.copies(whole) if tensor.nbytes else ():
                target, origin = copy_views(copy, self.memories[slot], buffer)
                target.copy_(origin)
        return buffer
