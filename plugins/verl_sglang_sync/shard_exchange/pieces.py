"""Cuts arranged buffers into pieces that are exchanged one after the other.

The scratch of an exchange holds pieces, not buckets, so that two of them fit: while one travels,
the next is packed and the one before unpacked. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sglang_loader.load_plan.arrangement import Arrangement, Read

BOUNDARY_BYTES = 4096
"""Buffers are cut at multiples of this: both sides of a cut keep their words whole."""


def cut_into_pieces(
    arrangements: Sequence[Arrangement], piece_nbytes: int
) -> list[tuple[Arrangement, ...]]:
    """The same number of pieces for every rank, each an arrangement of a part of the buffer.

    Args:
        arrangements: of one bucket, by rank.
        piece_nbytes: about so many bytes of the largest buffer to a piece, more where a strided
            read cannot be cut.

    Returns:
        By piece, then by rank. Places in the buffer stay what they are.

    Raises:
        ValueError: a piece cannot have less than one byte.
    """
    if piece_nbytes < 1:
        raise ValueError(f"a piece of {piece_nbytes} bytes holds nothing, at least 1 is allowed")
    largest = max(arrangement.nbytes for arrangement in arrangements)
    num_pieces = max(1, -(-largest // piece_nbytes))
    by_rank = [_pieces_of(arrangement, num_pieces) for arrangement in arrangements]
    return list(zip(*by_rank, strict=True))


def _pieces_of(arrangement: Arrangement, num_pieces: int) -> list[Arrangement]:
    ends = [
        -(-arrangement.nbytes * i // num_pieces // BOUNDARY_BYTES) * BOUNDARY_BYTES
        for i in range(1, num_pieces)
    ]
    pieces: list[list[Read]] = [[] for _ in range(num_pieces)]
    for read in arrangement.reads:
        rest = read
        for piece, end in enumerate(ends):
            if rest.start < end < rest.start + rest.nbytes:
                head, tail = _cut(rest, end)
                pieces[piece].append(head)
                if tail is None:
                    break
                rest = tail
            elif rest.start < end:
                pieces[piece].append(rest)
                break
        else:
            pieces[-1].append(rest)
    return [Arrangement(tuple(reads), arrangement.nbytes) for reads in pieces]


def _cut(read: Read, end: int) -> tuple[Read, Read | None]:
    """What lies before byte `end` of the buffer, or a little more, and the rest, if any."""
    if not read.dims:
        size = end - read.start
        tail = replace(read, offset=read.offset + size, run=read.run - size, start=end)
        return replace(read, run=size), tail
    (count, stride), *inner = read.dims
    step = read.nbytes // count
    rows = -(-(end - read.start) // step)
    if rows >= count:
        return read, None
    tail = replace(
        read,
        offset=read.offset + rows * stride,
        dims=((count - rows, stride), *inner),
        start=read.start + rows * step,
    )
    return replace(read, dims=((rows, stride), *inner)), tail
