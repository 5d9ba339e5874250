"""Where the bytes of a bucket are: one flat buffer, or pieces of the trainer's own memory.

A layout gives every tensor an offset, as if the bucket were one buffer. Where the trainer's tensors
are read in place, a `BucketMap` says which bytes of which memory stand behind those of that buffer,
and a `BucketSource` which memory that is:

    bucket_map = BucketMap([Piece.flat(0, 0, 4096), Piece.flat(4096, 1, 512)])
    source = BucketSource(bucket_map, [mapped, other])
    for copy, number in bucket_map.copies(bucket_copy): ...

Parameters that are offloaded come back in other memory, but lie there as before: another source,
the same map. A piece may end within a tensor, where a shard does; or a tensor's bytes are spread
over shards, as those of a row-parallel weight are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeAlias

import torch

from sglang_loader.common.copies import copy_views
from sglang_loader.common.layout import BucketLayout, check_buffer
from sglang_loader.common.regions.compose import ByteMap, shard_copies
from sglang_loader.common.regions.geometry import StridedCopy, split_copy

CopyFrom: TypeAlias = tuple[StridedCopy, int]
"""A copy whose `src` counts in the memory of this number."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of a bucket: a strided set of bytes of one shard, or of several (those of a
    parameter).

    Attributes:
        start: of the first byte in the bucket's layout.
        shards: number of the memory, first byte in it, and length in bytes; of several, none is
            empty.
        bytes: where the bytes are in the shards put one behind the other.
    """

    start: int
    shards: tuple[tuple[int, int, int], ...]
    bytes: ByteMap

    @classmethod
    def flat(cls, start: int, number: int, nbytes: int) -> Piece:
        """The first bytes of one memory."""
        return cls(start, ((number, 0, nbytes),), ByteMap(0, ((nbytes, 1),)))

    @property
    def nbytes(self) -> int:
        """Of the bucket."""
        return self.bytes.nbytes

    @property
    def is_within(self) -> bool:
        """True if the bytes, which begin behind no other and go forward, are in the shards."""
        reach = self.bytes.offset + sum((count - 1) * stride for count, stride in self.bytes.dims)
        return reach < sum(nbytes for _, _, nbytes in self.shards)

    def copies(self, copy: StridedCopy) -> Iterator[CopyFrom]:
        """A copy out of the piece, `src` counting from its first byte; ValueError is raised where a
        unit of it is parted by the end of a shard.
        """
        if self.bytes.is_dense and len(self.shards) == 1:  # most are: without a detour by shards
            ((number, offset, _),) = self.shards
            yield replace(copy, src=offset + self.bytes.offset + copy.src), number
            return
        starts = list(accumulate((nbytes for _, _, nbytes in self.shards), initial=0))[:-1]
        for shard, part in shard_copies(self.bytes, starts, copy):
            number, offset, nbytes = self.shards[shard]
            if part.src_bounds()[1] > nbytes:
                raise ValueError(f"a shard of {nbytes} bytes ends within {copy.unit}")
            yield (replace(part, src=offset + part.src) if offset else part), number


class BucketMap:
    """Pieces of one bucket, by ascending `start`. Two of the same pieces are not equal: what is
    found out of one is kept for as long as it lives.

    Raises:
        ValueError: pieces overlap, or are out of order.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        stop = 0
        for piece in pieces:
            if piece.start < stop:
                raise ValueError(
                    f"a piece starts at byte {piece.start}, the one before it ends at {stop}"
                )
            stop = piece.start + piece.nbytes
        self.pieces = tuple(pieces)
        self._starts = [piece.start for piece in pieces]

    def copies(self, copy: StridedCopy) -> Iterator[CopyFrom]:
        """A copy out of the bucket as copies out of the memory behind it; ValueError is raised
        where some of that is in no piece.
        """
        for part in split_copy(copy, self._starts):
            start, stop = part.src_bounds()
            i = bisect_right(self._starts, start) - 1
            if i < 0 or stop > self.pieces[i].start + self.pieces[i].nbytes:
                raise ValueError(f"bytes {start} to {stop} of the bucket are in no piece")
            yield from self.pieces[i].copies(replace(part, src=start - self.pieces[i].start))


class BucketSource:
    """The memory behind one bucket, which lives as long as this does: copies are bound to it.

    Args:
        memories: by the map's numbers, each flat contiguous uint8; else ValueError is raised.
    """

    def __init__(self, bucket_map: BucketMap, memories: Sequence[torch.Tensor]) -> None:
        for memory in memories:
            check_buffer(memory, 0)
        self.map = bucket_map
        self.memories = tuple(memories)

    @classmethod
    def flat(cls, buffer: torch.Tensor) -> BucketSource:
        """All of a bucket in one buffer: flat contiguous uint8."""
        check_buffer(buffer, 0)
        return cls(BucketMap([Piece.flat(0, 0, buffer.numel())]), [buffer])

    @property
    def device(self) -> torch.device:
        """Of its first memory; a CPU where there is none."""
        return self.memories[0].device if self.memories else torch.device("cpu")

    def packed(self, layout: BucketLayout) -> torch.Tensor:
        """The bucket as one buffer: the source's own memory if that is one, else a copy.

        Raises:
            ValueError: the source does not hold every byte of every tensor of the layout.
        """
        nbytes = layout.nbytes
        if len(self.map.pieces) == 1:
            (piece,) = self.map.pieces
            (number, offset, _), *others = piece.shards
            if piece.bytes.is_dense and not others and piece.start == 0 and piece.nbytes >= nbytes:
                return self.memories[number][offset + piece.bytes.offset :][:nbytes]
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        for tensor in layout.tensors:
            whole = StridedCopy(0, tensor.offset, tensor.offset, (), tensor.nbytes)
            for copy, number in self.map.copies(whole) if tensor.nbytes else ():
                target, origin = copy_views(copy, self.memories[number], buffer)
                target.copy_(origin)
        return buffer
