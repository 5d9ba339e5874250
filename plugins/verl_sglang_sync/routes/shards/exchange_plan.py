"""A plan of the bytes that each trainer rank sends to each reader. Pure.

A reader is an engine rank, or a trainer rank that receives for the engine rank on its own device.
`plan_sends` lists the parts that one trainer rank sends. `plan_reader` lists the parts that one
reader receives. Both list the same parts in the same order, so no offsets have to be sent.

The reader unpacks nothing. Its load plan reads from the receive buffer. `received` locates the
bucket there.

`pieces_of` cuts a bucket into pieces. Each piece has an equal part of the bytes of each pair of
ranks, so all ranks send at the same time. The scratch only has to hold pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TypeAlias

from sglang_loader.common.regions.arrangement import Arrangement, Read
from sglang_loader.common.regions.coalesce import join_adjacent
from sglang_loader.common.regions.geometry import StridedCopy
from sglang_loader.common.regions.intervals import merge, num_bytes, subtract
from sglang_loader.common.session.messages import BucketPiece
from verl_sglang_sync.sources.shard_reads import Origin, Owners, shard_reads

ALIGNMENT_BYTES = 8
"""The size of a word.

A part has the same offset in scratch and in the arranged buffer modulo the size of a word.
"""

CUT_BYTES = 4096
"""The unit in which parts are cut, so that words stay whole."""


@dataclass(frozen=True, slots=True)
class PieceSends:
    """The bytes that one rank sends in one piece of a bucket.

    Attributes:
        reads: the parts of this rank's shards, ordered by destination. `Read.tensor` is the
            parameter, `Read.offset` the offset in the shard, `Read.start` the offset in the
            scratch.
        nbytes: bytes of the scratch, by destination.
    """

    reads: tuple[Read, ...]
    nbytes: tuple[int, ...]


Sends: TypeAlias = tuple[tuple[Read, ...], ...]
"""The parts of one bucket that one rank sends, by destination. The rank itself is a destination.

`Read.tensor` and `Read.offset` are as in `PieceSends`. `Read.start` is the offset in the
destination's arranged buffer.
"""


def plan_sends(
    rank: int,
    arrangements: Sequence[Arrangement],
    origins: Sequence[Origin],
    owners: Sequence[Owners],
) -> Sends:
    """List the parts of one bucket that a trainer rank sends.

    Args:
        rank: the number of the trainer rank.
        arrangements: the arrangement of the bucket on each reader. Planning is faster if readers
            with equal arrangements share one object.
        origins: by position of a tensor in the bucket's layout.
        owners: by parameter.
    """
    sends: list[list[Read]] = [[] for _ in arrangements]
    by_arrangement: dict[int, list[int]] = {}
    for reader, arrangement in enumerate(arrangements):
        by_arrangement.setdefault(id(arrangement), []).append(reader)
    for readers in by_arrangement.values():
        for part in shard_reads(arrangements[readers[0]], origins, owners, only=rank):
            if rank not in part.holders:
                continue
            for reader in readers:
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
    """List the parts of one bucket that one reader receives, by the rank that sends the parts.

    Raises:
        ValueError: the parts do not fill the reader's arrangement exactly once.
    """
    by_sender: list[list[Read]] = [[] for _ in range(num_ranks)]
    for part in shard_reads(arrangement, origins, owners):
        by_sender[part.owner(reader)].append(part.read)
    _check_filled_once(arrangement, [read for reads in by_sender for read in reads])
    return [tuple(reads) for reads in by_sender]


@dataclass(frozen=True, slots=True)
class Received:
    """The locations of a bucket's bytes in the receive buffer of one reader.

    Attributes:
        sizes: by piece and source, the number of received bytes, which are consecutive in the
            buffer.
        pieces: the pieces of the bucket, by ascending `start`. `BucketPiece.offset` is the offset
            in the buffer.
        payloads: by source, the number of received bytes without padding.
    """

    sizes: list[list[int]]
    pieces: list[BucketPiece]
    payloads: list[int]

    @property
    def nbytes(self) -> int:
        """The size of the receive buffer."""
        return sum(map(sum, self.sizes))


def received(
    receives: Sequence[Sequence[Read]], num_pieces: int, *, joins: bool = True
) -> Received:
    """Locate one reader's bucket in its receive buffer.

    Args:
        receives: the result of `plan_reader`. The sources cut the same parts in the same way.
        num_pieces: number of pieces in which the bucket is sent.
        joins: join the pieces of the result where possible. If False, no piece of the result has
            gaps.
    """
    cut = [_cut(reads, num_pieces) for reads in receives]
    sizes: list[list[int]] = []
    pieces: list[BucketPiece] = []
    base = 0
    for number in range(num_pieces):
        placed, of_ranks = _laid_out([parts[number] for parts in cut])
        sizes.append(of_ranks)
        for pairs in placed:
            copies = [StridedCopy(0, base + at, r.start, (), r.nbytes) for r, at in pairs]
            pieces += [BucketPiece(0, c.src, c.dst, c.run) for c in join_adjacent(copies)]
        base += sum(of_ranks)
    pieces.sort(key=attrgetter("start"))
    if joins:
        # In a row-parallel weight each row has columns of several ranks, and the rows of one rank
        # are consecutive. The first call joins the columns of each row, the second joins the rows.
        pieces = _joined(_joined(pieces))
    return Received(sizes, pieces, list(map(total_nbytes, receives)))


def _joined(pieces: Sequence[BucketPiece]) -> list[BucketPiece]:
    """Join pieces that are consecutive in the bucket and evenly spaced in the buffer."""
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
    """Cut a rank's parts of a bucket into pieces, each about equally large for each destination."""
    cut = [_cut(reads, num_pieces) for reads in sends]
    pieces = []
    for number in range(num_pieces):
        placed, nbytes = _laid_out([parts[number] for parts in cut])
        reads = tuple(replace(read, start=place) for pairs in placed for read, place in pairs)
        pieces.append(PieceSends(reads, tuple(nbytes)))
    return pieces


def _cut(reads: Sequence[Read], num_pieces: int) -> list[list[Read]]:
    """Divide reads into about equal pieces."""
    # The result depends on sizes alone, so the sender and the reader compute the same pieces.
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
    """Cut a read after `nbytes` or slightly more. Return the head, and the rest or None."""
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
    """Place parts in a buffer, one rank after the other.

    The sender and the reader compute the same placement.

    Returns:
        By rank, the parts with their offsets in the buffer, and the bytes of all parts.
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
    """Return the total bytes of reads."""
    return sum(read.nbytes for read in reads)


def _check_filled_once(arrangement: Arrangement, filling: Sequence[Read]) -> None:
    """Raise ValueError if a byte of the arrangement is not filled exactly once."""
    wanted = merge((read.start, read.start + read.nbytes) for read in arrangement)
    filled = merge((read.start, read.start + read.nbytes) for read in filling)
    if wanted != filled:
        missing, surplus = subtract(wanted, filled)[:3], subtract(filled, wanted)[:3]
        raise ValueError(
            f"the shards do not match what the reader reads: {missing} missing, {surplus} too many"
        )
    if num_bytes(filled) != total_nbytes(filling):
        raise ValueError("some bytes of the arranged buffer are filled twice")
