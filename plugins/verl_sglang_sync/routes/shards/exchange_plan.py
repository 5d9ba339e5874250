"""Plans which bytes each trainer rank sends to each reader. Pure.

Readers are engine ranks, or trainer ranks that receive for the engine rank on their own device.
`plan_sends` lists the parts that one trainer rank sends, `plan_reader` those that one reader gets;
both list the same parts in the same order, so that only bytes have to be sent. The reader unpacks
nothing: its load plan reads the bucket's pieces from the receive buffer (`received`).

A bucket is sent in pieces (`pieces_of`), each with an equal part of the bytes of each pair of
ranks: all ranks send at the same time, and the scratch only has to hold pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from sglang_loader.common.regions.arrangement import Arrangement, Read
from sglang_loader.common.regions.coalesce import join_adjacent
from sglang_loader.common.regions.geometry import StridedCopy
from sglang_loader.common.regions.intervals import merge, num_bytes, subtract
from sglang_loader.common.session.messages import BucketPiece
from verl_sglang_sync.sources.shard_reads import Origin, Owners, shard_reads

ALIGNMENT_BYTES = 8
"""A part has the same offset in the scratch and in the arranged buffer modulo this: one word."""

CUT_BYTES = 4096
"""Parts are cut at multiples of this, so that words stay whole."""


@dataclass(frozen=True, slots=True)
class PieceSends:
    """One rank's part of one piece of a bucket.

    Attributes:
        reads: parts of this rank's shards: `Read.tensor` is the parameter, `Read.offset` an offset
            in the shard, `Read.start` one in the scratch; ordered by destination.
        nbytes: bytes of the scratch, by destination.
    """

    reads: tuple[Read, ...]
    nbytes: tuple[int, ...]


Sends: TypeAlias = tuple[tuple[Read, ...], ...]
"""One rank's parts of one bucket, by destination, including itself: reads as in `PieceSends`, but
`Read.start` is an offset in the destination's arranged buffer.
"""


def plan_sends(
    rank: int,
    arrangements: Sequence[Arrangement],
    origins: Sequence[Origin],
    owners: Sequence[Owners],
) -> Sends:
    """The parts of one bucket that `rank` sends.

    Args:
        arrangements: the bucket's, by rank; ranks that read the same may share one object, which is
            faster.
        origins: by position of a tensor in the bucket's layout.
        owners: by parameter.
    """
    sends: list[list[Read]] = [[] for _ in arrangements]
    by_arrangement: dict[int, list[int]] = {}
    for reader, arrangement in enumerate(arrangements):
        by_arrangement.setdefault(id(arrangement), []).append(reader)
    for readers in by_arrangement.values():
        for part in shard_reads(arrangements[readers[0]], origins, owners, only=rank):
            for reader in readers if rank in part.holders else ():
                if part.owner(reader) == rank:
                    sends[reader].append(part.read)
    return tuple(map(tuple, sends))


def plan_reader(
    reader: int,
    num_ranks: int,
    arrangement: Arrangement,
    origins: Sequence[Origin],
    owners: Sequence[Owners],
) -> list[tuple[Read, ...]]:
    """The parts of one bucket that one reader gets, by the rank that sends them.

    Raises:
        ValueError: they do not fill its arrangement exactly once.
    """
    found: list[list[Read]] = [[] for _ in range(num_ranks)]
    for part in shard_reads(arrangement, origins, owners):
        found[part.owner(reader)].append(part.read)
    _check_filled_once(arrangement, [read for reads in found for read in reads])
    return [tuple(reads) for reads in found]


@dataclass(frozen=True, slots=True)
class Received:
    """Where a reader's bucket is in its receive buffer.

    Attributes:
        sizes: by piece and source, the bytes received; they lie one after the other.
        pieces: of the bucket, by ascending `start`; `BucketPiece.offset` counts in the buffer.
        payloads: by source, the bytes received without padding.
    """

    sizes: list[list[int]]
    pieces: list[BucketPiece]
    payloads: list[int]

    @property
    def nbytes(self) -> int:
        """Size of the receive buffer."""
        return sum(map(sum, self.sizes))


def received(
    receives: Sequence[Sequence[Read]], num_pieces: int, *, joins: bool = True
) -> Received:
    """Where one reader's bucket is in its receive buffer.

    Args:
        receives: see `plan_reader`; sources cut their parts into pieces in the same way.
        joins: join pieces into as few as possible; False: each has consecutive bytes of one piece.
    """
    cut = [_cut(reads, num_pieces) for reads in receives]
    sizes: list[list[int]] = []
    found: list[BucketPiece] = []
    base = 0
    for number in range(num_pieces):
        placed, of_ranks = _laid_out([parts[number] for parts in cut])
        sizes.append(of_ranks)
        for pairs in placed:
            moved = [StridedCopy(0, base + at, r.start, (), r.nbytes) for r, at in pairs]
            found += [BucketPiece(0, c.src, c.dst, c.run) for c in join_adjacent(moved)]
        base += sum(of_ranks)
    found.sort(key=lambda piece: piece.start)
    if joins:
        found = _joined(_joined(found))
    return Received(sizes, found, list(map(total_nbytes, receives)))


def _joined(pieces: Sequence[BucketPiece]) -> list[BucketPiece]:
    """Join evenly spaced pieces that are consecutive in the bucket.

    In a row-parallel weight each row has columns of several ranks, and the rows of one rank lie one
    after the other: a first call joins the columns of each row, a second one the rows.
    """
    joined, at = [], 0
    while at < len(pieces):
        first, count = pieces[at], 1
        nbytes, dims = first.nbytes, first.dims
        step = pieces[at + 1].offset - first.offset if at + 1 < len(pieces) else 0
        while step > 0 and at + count < len(pieces):
            offset, start = first.offset + count * step, first.start + count * nbytes
            if pieces[at + count] != BucketPiece(first.slot, offset, start, nbytes, dims):
                break
            count += 1
        if count > 1:
            dims = ((count, step), *(dims or ((nbytes, 1),)))
            first = BucketPiece(first.slot, first.offset, first.start, count * nbytes, dims)
        joined.append(first)
        at += count
    return joined


def pieces_of(sends: Sends, num_pieces: int) -> list[PieceSends]:
    """Cut a bucket into pieces: the bytes of each pair of ranks are divided about equally."""
    cut = [_cut(reads, num_pieces) for reads in sends]
    pieces = []
    for number in range(num_pieces):
        placed, nbytes = _laid_out([parts[number] for parts in cut])
        reads = tuple(replace(read, start=place) for pairs in placed for read, place in pairs)
        pieces.append(PieceSends(reads, tuple(nbytes)))
    return pieces


def _cut(reads: Sequence[Read], num_pieces: int) -> list[list[Read]]:
    """Divide reads into about equal parts; depends only on sizes, so both ends do the same."""
    total, stop = total_nbytes(reads), 0
    pieces: list[list[Read]] = [[] for _ in range(num_pieces)]
    piece = 0
    for read in reads:
        rest: Read | None = read
        while rest is not None:
            end = total * (piece + 1) // num_pieces
            if stop >= end and piece < num_pieces - 1:
                piece += 1
                continue
            head, rest = _cut_one(rest, end - stop)
            pieces[piece].append(head)
            stop += head.nbytes
    return pieces


def _cut_one(read: Read, nbytes: int) -> tuple[Read, Read | None]:
    """The first `nbytes` of a read, or slightly more, and the rest, or None."""
    if not read.dims:
        size = -(-nbytes // CUT_BYTES) * CUT_BYTES
        if size >= read.run:
            return read, None
        start, offset = read.start + size, read.offset + size
        rest = replace(read, offset=offset, run=read.run - size, start=start)
        return replace(read, run=size), rest
    (count, stride), *inner = read.dims
    step = read.nbytes // count
    rows = -(-nbytes // step)
    if rows >= count:
        return read, None
    tail = replace(
        read,
        offset=read.offset + rows * stride,
        dims=((count - rows, stride), *inner),
        start=read.start + rows * step,
    )
    return replace(read, dims=((rows, stride), *inner)), tail


def _laid_out(by_rank: Sequence[Sequence[Read]]) -> tuple[list[list[tuple[Read, int]]], list[int]]:
    """By the other rank, its parts with their offsets in the buffer, and its bytes; both ends
    compute the same.
    """
    placed: list[list[tuple[Read, int]]] = []
    sizes: list[int] = []
    for reads in by_rank:
        offset, at, pairs = sum(sizes), 0, []
        for read in reads:
            at += (read.start - at) % ALIGNMENT_BYTES
            pairs.append((read, offset + at))
            at += read.nbytes
        placed.append(pairs)
        sizes.append(-(-at // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    return placed, sizes


def total_nbytes(reads: Iterable[Read]) -> int:
    """Total bytes of some reads."""
    return sum(read.nbytes for read in reads)


def _check_filled_once(arrangement: Arrangement, filling: Sequence[Read]) -> None:
    """Raise ValueError unless every byte of the arrangement is filled exactly once."""
    wanted = merge((read.start, read.start + read.nbytes) for read in arrangement)
    filled = merge((read.start, read.start + read.nbytes) for read in filling)
    if wanted != filled:
        missing, surplus = subtract(wanted, filled)[:3], subtract(filled, wanted)[:3]
        raise ValueError(f"the shards do not fill what is read: {missing} missing, {surplus} more")
    if num_bytes(filled) != total_nbytes(filling):
        raise ValueError("some bytes of the arranged buffer are filled twice")
