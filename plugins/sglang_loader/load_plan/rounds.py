"""Rounds: the part of a copy table whose shards this process cannot map, in portions to be sent.

    steps = wired_steps(table, senders, num_ranks, round_bytes)
    steps[0].rounds[0].sent          # the bytes that each trainer rank sends in the first round
    steps[0].rounds[0].copies        # from the buffer of the round into the model

The engine rank decides the order of the bytes: each lands in the buffer where the copies read
whole words. The buffer of a round has the bytes of one trainer rank after those of the other. Each
trainer rank sends about an equal part of its bytes in each round, so that all send at the same
time. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from msgspec.structs import replace

from sglang_loader.common.bucket_source import CopyFrom
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.coalesce import coalesce
from sglang_loader.common.regions.geometry import BYTES, Dim, StridedCopy, Unit, collapse
from sglang_loader.common.regions.read import Read
from sglang_loader.common.rounds import RoundPart, SentRound
from sglang_loader.common.weight_map import MAPPED
from sglang_loader.load_plan.copy_table import CopyTable, QuantizedPart

UNIT_ALIGNMENT = 16
"""Size of the widest dtype. A copy whose two sides agree modulo this moves words or elements."""

CUT_BYTES = 4096
"""The unit in which copies are cut, so that words stay whole."""


@dataclass(frozen=True, slots=True)
class Round:
    """One portion of the bytes that trainer ranks send to this engine rank.

    Attributes:
        sent: the bytes by trainer rank. The buffer of the round has them one rank after the other.
        copies: from the buffer of the round to the storages of the model and to the scratch buffer.
    """

    sent: SentRound
    copies: tuple[StridedCopy, ...]

    @property
    def nbytes(self) -> int:
        """The size of the round's buffer."""
        return sum(self.sent.sizes)


@dataclass(frozen=True, slots=True)
class WiredStep:
    """A `TableStep` whose copies are divided by wire. All else follows all of its copies."""

    mapped: tuple[CopyFrom, ...]
    rounds: tuple[Round, ...]
    rest: BucketLayout
    quantized: QuantizedPart | None


def wired_steps(
    table: CopyTable, senders: Sequence[int], num_ranks: int, round_bytes: int
) -> tuple[WiredStep, ...]:
    """Divide the steps of a table by wire, and cut what is sent into rounds.

    Args:
        senders: for each shard the trainer rank that sends it, or `MAPPED`.
        num_ranks: the number of trainer ranks.
        round_bytes: about the largest size of a round.
    """
    wired = []
    for step in table.steps:
        mapped = []
        sent: list[list[CopyFrom]] = [[] for _ in range(num_ranks)]
        # A shard is mapped or sent as a whole, and so are the copies from it.
        for copy, shard in step.copies:
            if senders[shard] == MAPPED:
                mapped.append((copy, shard))
            else:
                sent[senders[shard]].append((copy, shard))
        rounds = tuple(_rounds(sent, round_bytes))
        wired.append(WiredStep(tuple(mapped), rounds, step.rest, step.quantized))
    return tuple(wired)


def _rounds(sent: Sequence[Sequence[CopyFrom]], round_bytes: int) -> Iterator[Round]:
    """Yield the rounds of one step, given the copies from the shards of each trainer rank."""
    total = sum(num_bytes_read(copy) for copies in sent for copy, _ in copies)
    num_rounds = -(-total // round_bytes)
    # Each rank sends a part of its bytes in each round: in every round all links are busy.
    portions = [_portions(copies, num_rounds) for copies in sent]
    for number in range(num_rounds):
        parts: list[RoundPart] = []
        unpacked: list[StridedCopy] = []
        start = 0
        for of_rank in portions:
            part, copies = _packed(of_rank[number], start)
            parts.append(part)
            unpacked += copies
            start += part.size
        yield Round(SentRound(tuple(parts)), tuple(coalesce(unpacked)))


def _portions(copies: Sequence[CopyFrom], num: int) -> list[list[CopyFrom]]:
    """Divide copies into about equal portions."""
    total, taken = sum(num_bytes_read(copy) for copy, _ in copies), 0
    # Counted from the start, so that rounding does not add up over the portions.
    ends = [total * (number + 1) // num for number in range(num)]
    portions: list[list[CopyFrom]] = [[] for _ in range(num)]
    number, left = 0, list(reversed(copies))  # a stack: tails of cut copies come next
    while left:
        copy, shard = left.pop()
        while number < num - 1 and taken >= ends[number]:
            number += 1
        nbytes = num_bytes_read(copy)
        if number < num - 1 and nbytes > ends[number] - taken:
            copy, *tails = cut_copy(copy, ends[number] - taken)
            left += [(tail, shard) for tail in reversed(tails)]
            nbytes = num_bytes_read(copy)
        portions[number].append((copy, shard))
        taken += nbytes
    return portions


def cut_copy(copy: StridedCopy, nbytes: int) -> list[StridedCopy]:
    """Cut a copy behind about `nbytes` bytes of its source. The first result has these bytes."""
    available = num_bytes_read(copy)
    if available <= nbytes:
        return [copy]
    if not copy.dims:
        units = max(1, -(-nbytes // CUT_BYTES)) * CUT_BYTES // copy.unit.src_bytes
        if units >= copy.run:
            return [copy]
        src, dst = copy.src + units * copy.unit.src_bytes, copy.dst + units * copy.unit.dst_bytes
        return [replace(copy, run=units), replace(copy, src=src, dst=dst, run=copy.run - units)]
    count, src_stride, dst_stride = copy.dims[0]
    if not src_stride:  # every row reads the same bytes, which are sent once
        return [copy]
    inner = copy.dims[1:]

    def rows(first: int, number: int) -> StridedCopy:
        dims = ((number, src_stride, dst_stride), *inner) if number > 1 else inner
        src, dst = copy.src + first * src_stride, copy.dst + first * dst_stride
        return replace(copy, src=src, dst=dst, dims=dims)

    # Cut between two rows of the outermost dimension, or else within its first row.
    fitting = nbytes * count // available
    if fitting:
        return [rows(0, fitting), rows(fitting, count - fitting)]
    return [*cut_copy(rows(0, 1), nbytes), *([rows(1, count - 1)] if count > 1 else [])]


def num_bytes_read(copy: StridedCopy) -> int:
    """Return the bytes of the source. A byte that is repeated counts once."""
    nbytes = copy.run * copy.unit.src_bytes
    for count, src_stride, _ in copy.dims:
        nbytes *= count if src_stride else 1
    return nbytes


def _packed(copies: Sequence[CopyFrom], first: int) -> tuple[RoundPart, list[StridedCopy]]:
    """Pack the bytes that copies read of one trainer rank's shards in one round.

    Args:
        first: the offset of the rank's bytes in the buffer of the round, in whole units of
            `UNIT_ALIGNMENT`.

    Returns:
        The bytes, each once, and the copies from the buffer of the round.
    """
    reads: list[Read] = []
    unpacked: list[StridedCopy] = []
    nbytes = 0
    starts: dict[tuple[object, ...], int] = {}
    for copy, shard in copies:
        unit = copy.unit
        within, length, moved, num_moved = _packed_dims(copy.dims, copy.run, unit)
        # Two copies may read the same bytes, such as KV heads that are repeated.
        read = shard, copy.src, within, length, unit
        start = starts.get(read)
        if start is None:
            # This keeps the copy's words, or elements, whole.
            ahead = copy.dst if unit.cast is None else 0
            start = starts[read] = nbytes + (ahead - nbytes) % UNIT_ALIGNMENT
            reads.append(Read(shard, copy.src, within, length, start))
            nbytes = start + num_bytes_read(copy)
        unpacked.append(StridedCopy(copy.storage, first + start, copy.dst, moved, num_moved, unit))
    size = -(-nbytes // UNIT_ALIGNMENT) * UNIT_ALIGNMENT
    return RoundPart(tuple(reads), size), unpacked


@lru_cache(maxsize=4096)  # copies of few shapes read at many places
def _packed_dims(
    dims: tuple[Dim, ...], run: int, unit: Unit
) -> tuple[tuple[tuple[int, int], ...], int, tuple[Dim, ...], int]:
    """Return the dimensions and run of the read, and those of the copy from the packed bytes."""
    step = run * unit.src_bytes
    # Innermost first. A dimension with source stride 0 has stride 0 in the buffer, too.
    within, moves = [], []
    for count, src, dst in sorted(dims, key=itemgetter(1)):
        moves.append((count, step if src else 0, dst))
        if src:
            within.append((count, src, step))
            step *= count
    read, num_read = collapse(within, run * unit.src_bytes, BYTES)
    moved, num_moved = collapse(moves, run, unit)
    return tuple((count, src) for count, src, _ in read), num_read, moved, num_moved
