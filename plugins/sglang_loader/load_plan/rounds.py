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

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from sglang_loader.common.bucket_source import CopyFrom
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.coalesce import coalesce
from sglang_loader.common.regions.geometry import BYTES, StridedCopy, Unit, collapse
from sglang_loader.common.regions.read import Read
from sglang_loader.common.rounds import RoundPart, SentRound
from sglang_loader.common.weight_map import MAPPED
from sglang_loader.load_plan.copy_table import CopyTable

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
    """A `TableStep` whose copies are divided by wire. The rest follows all of its copies."""

    mapped: tuple[CopyFrom, ...]
    rounds: tuple[Round, ...]
    rest: BucketLayout


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
        for copy, shard in step.copies:
            if senders[shard] == MAPPED:
                mapped.append((copy, shard))
            else:
                sent[senders[shard]].append((copy, shard))
        wired.append(WiredStep(tuple(mapped), tuple(_rounds(sent, round_bytes)), step.rest))
    return tuple(wired)


def _rounds(sent: Sequence[Sequence[CopyFrom]], round_bytes: int) -> Iterator[Round]:
    """Yield the rounds of one step, given the copies from the shards of each trainer rank."""
    total = sum(num_bytes_read(copy) for copies in sent for copy, _ in copies)
    num_rounds = -(-total // round_bytes)
    portions = [_portions(copies, num_rounds) for copies in sent]
    for number in range(num_rounds):
        packed = [_Packed() for _ in sent]
        for of_rank, copies in zip(packed, portions, strict=True):
            for copy, shard in copies[number]:
                of_rank.add(copy, shard)
        sizes = [-(-of_rank.nbytes // UNIT_ALIGNMENT) * UNIT_ALIGNMENT for of_rank in packed]
        # The start of a rank's bytes is known when the sizes of the ranks before are.
        unpacked: list[StridedCopy] = []
        start = 0
        for of_rank, size in zip(packed, sizes, strict=True):
            unpacked += [replace(copy, src=copy.src + start) for copy in of_rank.copies]
            start += size
        parts = [
            RoundPart(tuple(of_rank.reads), size)
            for of_rank, size in zip(packed, sizes, strict=True)
        ]
        yield Round(SentRound(tuple(parts)), tuple(coalesce(unpacked)))


def _portions(copies: Sequence[CopyFrom], num: int) -> list[list[CopyFrom]]:
    """Divide copies into about equal portions."""
    total, taken = sum(num_bytes_read(copy) for copy, _ in copies), 0
    portions: list[list[CopyFrom]] = [[] for _ in range(num)]
    number, left = 0, list(reversed(copies))
    while left:
        copy, shard = left.pop()
        while number < num - 1 and taken >= total * (number + 1) // num:
            number += 1
        room = total if number == num - 1 else total * (number + 1) // num - taken
        head, *tails = cut_copy(copy, room)
        left += [(tail, shard) for tail in reversed(tails)]
        portions[number].append((head, shard))
        taken += num_bytes_read(head)
    return portions


def cut_copy(copy: StridedCopy, nbytes: int) -> list[StridedCopy]:
    """Cut a copy behind about `nbytes` bytes of its source. The first result has these bytes."""
    if num_bytes_read(copy) <= nbytes:
        return [copy]
    if not copy.dims:
        units = max(1, -(-nbytes // CUT_BYTES)) * CUT_BYTES // copy.unit.src_bytes
        if units >= copy.run:
            return [copy]
        src, dst = copy.src + units * copy.unit.src_bytes, copy.dst + units * copy.unit.dst_bytes
        return [replace(copy, run=units), replace(copy, src=src, dst=dst, run=copy.run - units)]
    (count, src_stride, dst_stride), *inner = copy.dims
    if not src_stride:  # every row reads the same bytes, which are sent once
        return [copy]
    row = replace(copy, dims=tuple(inner))

    def rows(first: int, number: int) -> StridedCopy:
        dims = ((number, src_stride, dst_stride), *inner) if number > 1 else tuple(inner)
        src, dst = copy.src + first * src_stride, copy.dst + first * dst_stride
        return replace(copy, src=src, dst=dst, dims=dims)

    fitting = nbytes // num_bytes_read(row)
    if fitting:
        return [rows(0, fitting), rows(fitting, count - fitting)]
    return [*cut_copy(row, nbytes), *([rows(1, count - 1)] if count > 1 else [])]


def num_bytes_read(copy: StridedCopy) -> int:
    """Return the bytes of the source. A byte that is repeated counts once."""
    moving = (count for count, src_stride, _ in copy.dims if src_stride)
    return copy.run * copy.unit.src_bytes * math.prod(moving)


class _Packed:
    """The bytes of one trainer rank in one round, while copies are added.

    Attributes:
        reads: of the rank's shards, each with its place in the packed bytes.
        copies: from the packed bytes.
        nbytes: of the packed bytes.
    """

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.copies: list[StridedCopy] = []
        self.nbytes = 0
        self._starts: dict[tuple[Read, Unit], int] = {}

    def add(self, copy: StridedCopy, shard: int) -> None:
        """Add the bytes that a copy reads, unless they are there already."""
        ordered, step = sorted(copy.dims, key=itemgetter(1)), copy.run * copy.unit.src_bytes
        # Innermost first. A dimension with source stride 0 has stride 0 in the buffer, too.
        within, moves = [], []
        for count, src, dst in ordered:
            moves.append((count, step if src else 0, dst))
            if src:
                within.append((count, src, step))
                step *= count
        dims, run = collapse(within, copy.run * copy.unit.src_bytes, BYTES)
        read = Read(shard, copy.src, tuple((count, src) for count, src, _ in dims), run, 0)
        start = self._starts.get((read, copy.unit))
        if start is None:
            # This keeps the copy's words, or elements, whole.
            ahead = copy.dst if copy.unit.cast is None else 0
            start = self.nbytes + (ahead - self.nbytes) % UNIT_ALIGNMENT
            self._starts[read, copy.unit] = start
            self.reads.append(replace(read, start=start))
            self.nbytes = start + read.nbytes
        moved, units = collapse(moves, copy.run, copy.unit)
        self.copies.append(StridedCopy(copy.storage, start, copy.dst, moved, units, copy.unit))
