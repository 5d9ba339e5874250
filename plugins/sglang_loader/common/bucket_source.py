"""Where the bytes of a bucket are: one flat buffer, or pieces of the trainer's own memory.

A layout gives every tensor an offset, as if the bucket were one buffer. Where the trainer's tensors
are read in place, `BucketSource` says which memory stands behind which bytes of that buffer:

    source = BucketSource([Piece(0, mapped[4096:8192]), Piece(4096, other[:512])])
    memory, offset = source.locate(4096, 4608)      # other, 0

A plan is made for the layout alone, and a piece may end within a tensor, where a shard does. Copies
are split at the ends of pieces when they are bound (`split_copy`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_loader.common.layout import BucketLayout, check_buffer


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of a bucket.

    Attributes:
        start: of the first byte in the bucket's layout.
        memory: flat contiguous uint8, all of it part of the piece.
    """

    start: int
    memory: torch.Tensor


class BucketSource:
    """The memory behind one bucket; it lives as long as the source does.

    Args:
        pieces: by ascending `start`.

    Raises:
        ValueError: pieces overlap, are out of order, or are not flat bytes.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        stop = 0
        for piece in pieces:
            check_buffer(piece.memory, 0)
            if piece.start < stop:
                raise ValueError(
                    f"a piece starts at byte {piece.start}, the one before it ends at {stop}"
                )
            stop = piece.start + piece.memory.numel()
        self._pieces = tuple(pieces)
        self.starts = [piece.start for piece in pieces]
        self.key = tuple((piece.start, piece.memory.data_ptr()) for piece in pieces)

    @classmethod
    def flat(cls, buffer: torch.Tensor) -> BucketSource:
        """All of a bucket in one buffer: flat contiguous uint8."""
        return cls([Piece(0, buffer)])

    def check(self, layout: BucketLayout) -> None:
        """Raise ValueError unless the pieces hold every byte of every tensor of the layout."""
        for tensor in layout.tensors:
            if tensor.nbytes:
                self.parts(tensor.offset, tensor.offset + tensor.nbytes)

    def locate(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        """The memory that holds bytes [start, stop) of the bucket, and where in it they begin.

        Raises:
            ValueError: no single piece holds them.
        """
        i = bisect_right(self.starts, start) - 1
        if i >= 0:
            piece = self._pieces[i]
            if stop <= piece.start + piece.memory.numel():
                return piece.memory, start - piece.start
        raise ValueError(f"bytes {start} to {stop} of the bucket are in no piece of its source")

    def parts(self, start: int, stop: int) -> list[torch.Tensor]:
        """The memory that holds bytes [start, stop) of the bucket, piece by piece.

        Raises:
            ValueError: no piece holds one of them.
        """
        found, at = [], start
        while at < stop:
            i = bisect_right(self.starts, at) - 1
            piece = self._pieces[i] if i >= 0 else None
            end = piece.start + piece.memory.numel() if piece is not None else at
            if piece is None or end <= at:
                raise ValueError(f"byte {at} of the bucket is in no piece of its source")
            found.append(piece.memory[at - piece.start : min(end, stop) - piece.start])
            at = end
        return found

    def packed(self, layout: BucketLayout) -> torch.Tensor:
        """The bucket as one buffer: the source's own memory if that is one, else a copy.

        Raises:
            ValueError: the source does not hold every byte of every tensor of the layout.
        """
        nbytes = layout.nbytes
        if len(self._pieces) == 1 and self._pieces[0].start == 0:
            memory = self._pieces[0].memory
            if memory.numel() >= nbytes:
                return memory[:nbytes]
        self.check(layout)
        device = self._pieces[0].memory.device if self._pieces else None
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        for piece in self._pieces:
            room = buffer[piece.start : piece.start + piece.memory.numel()]
            room.copy_(piece.memory[: room.numel()])
        return buffer
