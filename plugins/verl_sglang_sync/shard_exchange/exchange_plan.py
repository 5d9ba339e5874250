"""Which bytes each trainer rank sends to which, so that every rank's arranged buffer is filled.

An engine rank reads a part of every exported tensor (`Arrangement`), a tensor is a part of a
parameter (`Origin`), and a parameter lies in shards on the ranks (`Owners`). `plan_piece` follows
the bytes of a bucket, or of a piece of one, back, cuts them where shards end, and keeps what one
rank has to do with them:

    own        a shard of this rank -> its arranged buffer
    sends      shards of this rank  -> send scratch, by destination
    landings   receive scratch      -> its arranged buffer, by source

Both ends of a pair list the same parts in the same order, so nothing but bytes travels. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sglang_loader.load_plan.arrangement import Arrangement, Read
from sglang_loader.load_plan.geometry import StridedCopy
from sglang_loader.load_plan.layout import BucketLayout
from sglang_loader.load_plan.source import split_copy
from verl_sglang_sync.traced_export.origins import Origin, compose
from verl_sglang_sync.traced_export.owners import Owners

ALIGNMENT_BYTES = 8
"""A part lies in the scratch as it does in the arranged buffer, modulo this: one word size."""


@dataclass(frozen=True, slots=True)
class PieceExchange:
    """What one rank does for one piece of a bucket.

    Attributes:
        own: parts of this rank's shards; `Read.tensor` is the parameter, `Read.offset` a byte of
            the shard, `Read.start` a byte of the arranged buffer.
        sends: likewise, but `Read.start` is a byte of the send scratch.
        send_nbytes: of the send scratch, by destination; the parts of each are consecutive.
        landings: out of the receive scratch; `Read.offset` is a byte of that, `Read.start` one of
            the arranged buffer.
        recv_nbytes: of the receive scratch, by source.
        nbytes: of the arranged buffer.
    """

    own: tuple[Read, ...]
    sends: tuple[Read, ...]
    send_nbytes: tuple[int, ...]
    landings: tuple[Read, ...]
    recv_nbytes: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardRead:
    """A part of a destination's arranged buffer that lies in one shard.

    Attributes:
        owner: who sends it; None where every rank has it.
        read: `tensor` is the parameter, `offset` a byte of the shard, `start` in the buffer.
        nbytes: bytes of the part.
    """

    owner: int | None
    read: Read
    nbytes: int


def plan_piece(
    rank: int,
    arrangements: Sequence[Arrangement],
    origins: Sequence[Origin],
    owners: Sequence[Owners],
) -> PieceExchange:
    """What `rank` does for one piece of a bucket, or for all of it.

    Args:
        rank: whose plan.
        arrangements: of the piece, by trainer rank.
        origins: of the bucket's tensors, by position in its layout.
        owners: by parameter.

    Raises:
        ValueError: the parts do not fill what the rank's arrangement reads exactly once.
    """
    own: list[Read] = []
    arriving: list[list[ShardRead]] = [[] for _ in arrangements]
    leaving: list[list[ShardRead]] = [[] for _ in arrangements]
    for destination, arrangement in enumerate(arrangements):
        mine = destination == rank
        for part in parts_of(arrangement, origins, owners, None if mine else rank):
            owner = destination if part.owner is None else part.owner
            if mine and owner == rank:
                own.append(part.read)
            elif mine:
                arriving[owner].append(part)
            elif owner == rank:
                leaving[destination].append(part)
    sent, send_nbytes = _laid_out(leaving)
    sends = [replace(part.read, start=place) for pairs in sent for part, place in pairs]
    received, recv_nbytes = _laid_out(arriving)
    landings = [landing for pairs in received for landing in _landings(pairs)]
    _check_filled_once(arrangements[rank], own, landings)
    return PieceExchange(
        tuple(own),
        tuple(sends),
        tuple(send_nbytes),
        tuple(landings),
        tuple(recv_nbytes),
        arrangements[rank].nbytes,
    )


def parts_of(
    arrangement: Arrangement,
    origins: Sequence[Origin],
    owners: Sequence[Owners],
    only: int | None = None,
) -> Iterator[ShardRead]:
    """An arrangement's reads, cut into shards, in the order of the reads.

    Args:
        arrangement: of the destination.
        origins: of the bucket's tensors.
        owners: by parameter.
        only: leave out what this rank does not own, where that is quickly known.
    """
    for read in arrangement.reads:
        nbytes = read.nbytes
        if not nbytes:
            continue
        origin = origins[read.tensor]
        held = owners[origin.parameter]
        source = origin.bytes
        if source.is_dense:
            first = source.offset + read.offset
            stop = first + read.run
            for count, stride in read.dims:
                stop += (count - 1) * stride
            shard = bisect_right(held.starts, first) - 1
            start, end = held.range_of(shard)
            if stop <= end:
                owner = held.ranks[shard] if held.ranks else None
                if only is None or owner == only:
                    local = Read(origin.parameter, first - start, read.dims, read.run, read.start)
                    yield ShardRead(owner, local, nbytes)
                continue
        for part in compose(source, read.offset, read.dims, read.run, read.start):
            dims, step = [], part.nbytes
            for count, stride in part.dims:
                step //= count
                dims.append((count, stride, step))
            whole = StridedCopy(0, part.offset, part.start, tuple(dims), part.run)
            for copy in split_copy(whole, held.starts):
                yield _shard_read(copy, origin.parameter, held)


def _shard_read(copy: StridedCopy, parameter: int, held: Owners) -> ShardRead:
    shard = held.shard_of(copy.src)
    dims = tuple((count, stride) for count, stride, _ in copy.dims)
    read = Read(parameter, copy.src - held.starts[shard], dims, copy.run, copy.dst)
    return ShardRead(held.ranks[shard] if held.ranks else None, read, read.nbytes)


def _laid_out(
    by_rank: Sequence[Sequence[ShardRead]],
) -> tuple[list[list[tuple[ShardRead, int]]], list[int]]:
    """For each other rank its parts with their places in the scratch, and its bytes there.

    Within the bytes of a pair of ranks it is the same on both ends.
    """
    placed: list[list[tuple[ShardRead, int]]] = []
    sizes: list[int] = []
    for parts in by_rank:
        offset, at, pairs = sum(sizes), 0, []
        for part in parts:
            at += (part.read.start - at) % ALIGNMENT_BYTES
            pairs.append((part, offset + at))
            at += part.nbytes
        placed.append(pairs)
        sizes.append(-(-at // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    return placed, sizes


def _landings(pairs: Sequence[tuple[ShardRead, int]]) -> list[Read]:
    """Received parts, those that continue each other as one."""
    landings: list[Read] = []
    for part, scratch in pairs:
        start, nbytes = part.read.start, part.nbytes
        last = landings[-1] if landings else None
        if (
            last is not None
            and last.offset + last.run == scratch
            and last.start + last.run == start
        ):
            landings[-1] = Read(0, last.offset, (), last.run + nbytes, last.start)
        else:
            landings.append(Read(0, scratch, (), nbytes, start))
    return landings


def _check_filled_once(
    arrangement: Arrangement, own: Sequence[Read], landings: Sequence[Read]
) -> None:
    """Conservation: what is read is filled, nothing twice, nothing else."""
    wanted = _joined([(read.start, read.nbytes) for read in arrangement.reads])
    filled = _joined([(read.start, read.nbytes) for read in (*own, *landings)])
    if wanted != filled or (wanted and wanted[-1][1] > arrangement.nbytes):
        missing = next(
            (w for w, f in zip(wanted, [*filled, None], strict=False) if w != f), "something else"
        )
        raise ValueError(f"the shards do not fill bytes {missing} of the arranged buffer as read")


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """`(start, nbytes)` as ascending `(start, stop)` that do not touch.

    Raises:
        ValueError: two of them share a byte.
    """
    joined: list[tuple[int, int]] = []
    for start, nbytes in sorted(ranges):
        if not nbytes:
            continue
        if joined and start < joined[-1][1]:
            raise ValueError(f"byte {start} of the arranged buffer is filled twice")
        if joined and start == joined[-1][1]:
            joined[-1] = (joined[-1][0], start + nbytes)
        else:
            joined.append((start, start + nbytes))
    return joined


def whole_bucket(layout: BucketLayout) -> Arrangement:
    """For a bucket that is not arranged: all of its tensors, where its layout has them."""
    reads = tuple(
        Read(i, 0, (), tensor.nbytes, tensor.offset) for i, tensor in enumerate(layout.tensors)
    )
    return Arrangement(reads, layout.nbytes)
