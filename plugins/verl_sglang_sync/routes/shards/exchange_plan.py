"""Which bytes each trainer rank sends to which, so that every reader gets what it reads.

Readers are engine ranks, or stand for those of their own device: `sources.transfer_plan` says what
each reads. `plan_sends` keeps what one trainer rank has to send, `plan_reader` what one reader gets
from each; both list the same parts in the same order, so nothing but bytes travels. The reader
unpacks nothing: its load plan reads the bucket where it lies in what came (`received`).

A bucket travels in pieces (`pieces_of`), an equal part of what each pair exchanges, so that all
ranks send at a time, and out of scratch that only has to hold pieces. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from sglang_loader.common.regions.arrangement import Arrangement, Read
from sglang_loader.common.regions.intervals import merge, num_bytes
from sglang_loader.common.session.messages import BucketPiece
from verl_sglang_sync.sources.transfer_plan import Origin, Owners, shard_reads

ALIGNMENT_BYTES = 8
"""A part lies in the scratch as it does in the arranged buffer, modulo this: one word size."""

CUT_BYTES = 4096
"""A part is cut at multiples of this: the words on both sides stay whole."""


@dataclass(frozen=True, slots=True)
class PieceSends:
    """What one rank sends of one piece of a bucket.

    Attributes:
        reads: of this rank's shards: `Read.tensor` is the parameter, `Read.offset` a byte of the
            shard, `Read.start` one of the scratch; those for one destination are consecutive.
        nbytes: of the scratch, by destination.
    """

    reads: tuple[Read, ...]
    nbytes: tuple[int, ...]


Sends: TypeAlias = tuple[tuple[Read, ...], ...]
"""What one rank sends of one bucket, by destination, itself too: parts of its shards, as in
`PieceSends`, but `Read.start` is a byte of what the destination reads (`Arrangement`).
"""


def plan_sends(
    rank: int,
    arrangements: Sequence[Arrangement],
    origins: Sequence[Origin],
    owners: Sequence[Owners],
) -> Sends:
    """What `rank` sends of one bucket.

    Args:
        arrangements: of the bucket, by rank; quicker where engines that read the same share one
            object.
        origins: of the bucket's tensors, by position in its layout.
        owners: by parameter.
    """
    sends: list[list[Read]] = [[] for _ in arrangements]
    alike: dict[int, list[int]] = {}
    for reader, arrangement in enumerate(arrangements):
        alike.setdefault(id(arrangement), []).append(reader)
    for readers in alike.values():
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
    """What one reader gets of one bucket, by the rank that holds it.

    Raises:
        ValueError: the parts do not fill what it reads exactly once.
    """
    found: list[list[Read]] = [[] for _ in range(num_ranks)]
    for part in shard_reads(arrangement, origins, owners):
        found[part.owner(reader)].append(part.read)
    _check_filled_once(arrangement, [read for reads in found for read in reads])
    return [tuple(reads) for reads in found]


@dataclass(frozen=True, slots=True)
class Received:
    """How a reader finds its bucket in what it receives.

    Attributes:
        sizes: by piece, then by source: bytes that come, one behind the other.
        pieces: of the bucket, by ascending start; `BucketPiece.offset` is a byte of those.
        payloads: by source: how many of the bytes are read.
    """

    sizes: list[list[int]]
    pieces: list[BucketPiece]
    payloads: list[int]

    @property
    def nbytes(self) -> int:
        """Of all that comes."""
        return sum(map(sum, self.sizes))


def received(
    receives: Sequence[Sequence[Read]], num_pieces: int, *, joins: bool = True
) -> Received:
    """How one reader finds one bucket.

    Args:
        receives: see `plan_reader`; every source must cut what it sends likewise.
        joins: as few pieces as can be; False: each is of consecutive bytes that come at a time.
    """
    cut = [_cut(reads, num_pieces) for reads in receives]
    sizes: list[list[int]] = []
    found: list[BucketPiece] = []
    base = 0
    for number in range(num_pieces):
        placed, of_ranks = _laid_out([parts[number] for parts in cut])
        sizes.append(of_ranks)
        for pairs in placed:
            found += _pieces_at(base, pairs)
        base += sum(of_ranks)
    found.sort(key=lambda piece: piece.start)
    if joins:
        found = _joined(_joined(found))
    return Received(sizes, found, list(map(num_read, receives)))


def _joined(pieces: Sequence[BucketPiece]) -> list[BucketPiece]:
    """The same bytes: pieces at one distance that continue each other in the bucket as one.

    Of a row-parallel weight, each row has columns of several ranks, and the rows of one rank lie
    one behind the other: the columns of a row are joined first, and then the rows.
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
    """The bucket in pieces, as many on all ranks, of about one size for each pair of ranks."""
    cut = [_cut(reads, num_pieces) for reads in sends]
    pieces = []
    for number in range(num_pieces):
        placed, nbytes = _laid_out([parts[number] for parts in cut])
        reads = tuple(replace(read, start=place) for pairs in placed for read, place in pairs)
        pieces.append(PieceSends(reads, tuple(nbytes)))
    return pieces


def _cut(reads: Sequence[Read], num_pieces: int) -> list[list[Read]]:
    """Reads divided at each `num_pieces`-th of their bytes: by sizes alone, alike on both ends."""
    total, stop = num_read(reads), 0
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
    """The first `nbytes` of a read, or a little more, and the rest, if any."""
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


def _laid_out(
    by_rank: Sequence[Sequence[Read]],
) -> tuple[list[list[tuple[Read, int]]], list[int]]:
    """By other rank: its parts with their places in the scratch, the same on its end; and bytes."""
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


def _pieces_at(base: int, pairs: Sequence[tuple[Read, int]]) -> list[BucketPiece]:
    """Parts, each at a place behind `base`; those that continue each other as one."""
    pieces: list[BucketPiece] = []
    for read, place in pairs:
        offset, start, nbytes = base + place, read.start, read.nbytes
        if pieces:
            last = pieces[-1]
            if (last.offset + last.nbytes, last.start + last.nbytes) == (offset, start):
                del pieces[-1]
                offset, start, nbytes = last.offset, last.start, last.nbytes + nbytes
        pieces.append(BucketPiece(0, offset, start, nbytes))
    return pieces


def num_read(reads: Iterable[Read]) -> int:
    """Bytes of all of them."""
    return sum(read.nbytes for read in reads)


def _check_filled_once(arrangement: Arrangement, filling: Sequence[Read]) -> None:
    """Conservation: what is read is filled, nothing twice, nothing else; else `ValueError`."""
    wanted = merge((read.start, read.start + read.nbytes) for read in arrangement)
    filled = merge((read.start, read.start + read.nbytes) for read in filling)
    if wanted != filled:
        missing = next((w for w, f in zip(wanted, [*filled, None], strict=False) if w != f), "more")
        raise ValueError(f"the shards do not fill bytes {missing} of the arranged buffer as read")
    if num_bytes(filled) != num_read(filling):
        raise ValueError("some bytes of the arranged buffer are filled twice")
