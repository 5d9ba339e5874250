"""Where the bytes of a bucket are: one flat buffer, or pieces of the trainer's own memory.

A layout gives every tensor an offset, as if the bucket were one buffer. Where the trainer's tensors
are read in place, `BucketSource` says which memory stands behind which bytes of that buffer:

    source = BucketSource([Piece.flat(0, mapped[4096:8192]), Piece.flat(4096, other[:512])])
    for copy, memory in source.copies(bucket_copy): ...

A plan is made for the layout alone: copies are found in the memory when they are bound. A piece may
end within a tensor, where a shard does; or a tensor's bytes are spread over shards, as those of a
row-parallel weight are.
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

CopyFrom: TypeAlias = tuple[StridedCopy, torch.Tensor]
"""A copy whose `src` counts in this memory: flat uint8."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of a bucket: a strided set of bytes of one memory, or of several (the
    shards of a parameter).

    Attributes:
        start: of the first byte in the bucket's layout.
        memories: flat contiguous uint8.
        bytes: where the bytes are in the memories put one behind the other; of several, none is
            empty.
    """

    start: int
    memories: tuple[torch.Tensor, ...]
    bytes: ByteMap

    @classmethod
    def flat(cls, start: int, memory: torch.Tensor) -> Piece:
        """All of one memory."""
        return cls(start, (memory,), ByteMap(0, ((memory.numel(), 1),)))

    @property
    def nbytes(self) -> int:
        """Of the bucket."""
        return self.bytes.nbytes

    @property
    def is_within(self) -> bool:
        """True if the bytes, which begin behind no other and go forward, are in the memories."""
        reach = self.bytes.offset + sum((count - 1) * stride for count, stride in self.bytes.dims)
        return reach < sum(memory.numel() for memory in self.memories)

    def copies(self, copy: StridedCopy) -> Iterator[CopyFrom]:
        """A copy out of the piece, `src` counting from its first byte."""
        starts = list(accumulate((memory.numel() for memory in self.memories), initial=0))[:-1]
        for shard, part in shard_copies(self.bytes, starts, copy):
            yield part, self.memories[shard]


class BucketSource:
    """The memory behind one bucket, which lives as long as this does; pieces by ascending `start`.
    Two of the same pieces are not equal: copies are bound to one.

    Raises:
        ValueError: pieces overlap, are out of order, or are not flat bytes.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        stop = 0
        for piece in pieces:
            for memory in piece.memories:
                check_buffer(memory, 0)
            if piece.start < stop:
                raise ValueError(
                    f"a piece starts at byte {piece.start}, the one before it ends at {stop}"
                )
            stop = piece.start + piece.nbytes
        self._pieces = tuple(pieces)
        self._starts = [piece.start for piece in pieces]

    @classmethod
    def flat(cls, buffer: torch.Tensor) -> BucketSource:
        """All of a bucket in one buffer: flat contiguous uint8."""
        return cls([Piece.flat(0, buffer)])

    @property
    def device(self) -> torch.device:
        """Of its first memory; a CPU where there is none."""
        return self._pieces[0].memories[0].device if self._pieces else torch.device("cpu")

    def copies(self, copy: StridedCopy) -> Iterator[CopyFrom]:
        """A copy out of the bucket as copies out of the memory behind it; ValueError is raised
        where some of that is in no piece.
        """
        for part in split_copy(copy, self._starts):
            start, stop = part.src_bounds()
            i = bisect_right(self._starts, start) - 1
            if i < 0 or stop > self._pieces[i].start + self._pieces[i].nbytes:
                raise ValueError(f"bytes {start} to {stop} of the bucket are in no piece")
            yield from self._pieces[i].copies(replace(part, src=start - self._pieces[i].start))

    def packed(self, layout: BucketLayout) -> torch.Tensor:
        """The bucket as one buffer: the source's own memory if that is one, else a copy.

        Raises:
            ValueError: the source does not hold every byte of every tensor of the layout.
        """
        nbytes = layout.nbytes
        if len(self._pieces) == 1:
            (piece,) = self._pieces
            is_flat = piece.bytes.is_dense and len(piece.memories) == 1
            if is_flat and piece.start == 0 and piece.nbytes >= nbytes:
                return piece.memories[0][piece.bytes.offset :][:nbytes]
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        for tensor in layout.tensors:
            whole = StridedCopy(0, tensor.offset, tensor.offset, (), tensor.nbytes)
            for copy, memory in self.copies(whole) if tensor.nbytes else ():
                target, origin = copy_views(copy, memory, buffer)
                target.copy_(origin)
        return buffer
