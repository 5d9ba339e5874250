"""Where the bytes of a bucket are: in one flat buffer, or in pieces of the trainer's own memory.

A layout gives every tensor an offset, as if the bucket were one buffer. If the trainer's tensors
are read in place, a `BucketMap` maps the bytes of that buffer to bytes of numbered memories, and a
`BucketSource` has these memories:

    bucket_map = BucketMap([Piece.flat(0, 0, 4096), Piece.flat(4096, 1, 512)])
    source = BucketSource(bucket_map, [mapped, other])
    for copy, number in bucket_map.copies(bucket_copy): ...

Parameters that were offloaded come back in other memory with the same layout: another source, the
same map. A piece may end within a tensor, where a shard ends; or a tensor's bytes are spread over
shards, like those of a row-parallel weight.
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
"""A copy, and the number of the memory in which its `src` is an offset."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of a bucket that are a strided set of bytes of a parameter's shards.

    Attributes:
        start: offset of the first byte in the bucket's layout.
        shards: `(memory number, offset, length)` in bytes; of several, none is empty.
        bytes: the bytes' places in the concatenated shards.
    """

    start: int
    shards: tuple[tuple[int, int, int], ...]
    bytes: ByteMap

    @classmethod
    def flat(cls, start: int, number: int, nbytes: int) -> Piece:
        """A piece that is the first bytes of one memory."""
        return cls(start, ((number, 0, nbytes),), ByteMap(0, ((nbytes, 1),)))

    @property
    def nbytes(self) -> int:
        """Bytes of the bucket."""
        return self.bytes.nbytes

    @property
    def is_within(self) -> bool:
        """True if all bytes are in the shards; no offset or stride is negative."""
        reach = self.bytes.offset + sum((count - 1) * stride for count, stride in self.bytes.dims)
        return reach < sum(nbytes for _, _, nbytes in self.shards)

    def copies(self, copy: StridedCopy) -> Iterator[CopyFrom]:
        """Copies from the memories for a copy whose `src` is an offset in the piece.

        Raises:
            ValueError: a shard ends within a unit of the copy.
        """
        if self.bytes.is_dense and len(self.shards) == 1:  # most are: faster than `shard_copies`
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
    """Pieces of one bucket, by ascending `start`. Compared by identity: it is the key of what is
    computed from it, for as long as it lives.

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
        """Copies from the memories for a copy from the bucket.

        Raises:
            ValueError: some of its bytes are in no piece.
        """
        for part in split_copy(copy, self._starts):
            start, stop = part.src_bounds()
            i = bisect_right(self._starts, start) - 1
            if i < 0 or stop > self.pieces[i].start + self.pieces[i].nbytes:
                raise ValueError(f"bytes {start} to {stop} of the bucket are in no piece")
            yield from self.pieces[i].copies(replace(part, src=start - self.pieces[i].start))


class BucketSource:
    """The memories in which one bucket lies; copies that are bound to them hold this object.

    Args:
        memories: by the map's numbers, each flat contiguous uint8.

    Raises:
        ValueError: a memory is anything else.
    """

    def __init__(self, bucket_map: BucketMap, memories: Sequence[torch.Tensor]) -> None:
        for memory in memories:
            check_buffer(memory, 0)
        self.map = bucket_map
        self.memories = tuple(memories)

    @classmethod
    def flat(cls, buffer: torch.Tensor) -> BucketSource:
        """The source of a bucket in one buffer, flat contiguous uint8."""
        check_buffer(buffer, 0)
        return cls(BucketMap([Piece.flat(0, 0, buffer.numel())]), [buffer])

    @property
    def device(self) -> torch.device:
        """The device of its first memory; the CPU if there is none."""
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
