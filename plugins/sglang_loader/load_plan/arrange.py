"""Makes a bucket's arrangement out of its plan, and the plan that reads the arranged buffer. Pure.

    arranged = arrange(plan)
    if arranged is not None:
        replay_once(arranged.plan, destinations, load_weights, gathered)

The arranged bytes are in the order of the bucket. Tensors that are read more than once come whole.
Arrangements are made when a trainer first asks for them, and `verify.why_misarranged` proves them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from sglang_loader.common.layout import BucketLayout, digest_of, encode_arrangements, encode_layout
from sglang_loader.common.regions.arrangement import Arrangement, Read, arranged_nbytes
from sglang_loader.common.regions.coalesce import coalesce
from sglang_loader.common.regions.geometry import BYTES, StridedCopy, Unit, collapse, split_copy
from sglang_loader.load_plan.plan import BucketPlan

UNIT_ALIGNMENT = 16
"""No dtype is wider: a copy whose two sides agree modulo this moves words, or whole elements."""

MAX_PART = 0.9
"""A bucket of which more is read comes whole: there is next to nothing to win."""


class ArrangedBucket(NamedTuple):
    """The part of a bucket that this rank reads, and the plan that loads the bucket from it."""

    arrangement: Arrangement
    plan: BucketPlan


@dataclass(frozen=True)
class ArrangedBuckets:
    """Which buckets of a sync may come arranged, and how.

    Attributes:
        buckets: for each bucket its arrangement and plan; None if it must come whole.
        encoded: the arrangements for the trainer (see `layout`); empty if there are none.
        digest: names them on the wire; "" if there are none.
    """

    buckets: tuple[ArrangedBucket | None, ...] = ()
    encoded: bytes = b""
    digest: str = ""

    @classmethod
    def of(cls, plans: Sequence[BucketPlan]) -> ArrangedBuckets:
        """Arrange the buckets of these plans, in order."""
        buckets = tuple(map(_arrange_if_smaller, plans))
        if not any(buckets):
            return ALL_WHOLE
        layouts = [digest_of(encode_layout(plan.layout)) for plan in plans]
        arrangements = [each and each.arrangement for each in buckets]
        encoded = encode_arrangements(tuple(zip(layouts, arrangements, strict=True)))
        return cls(buckets, encoded, digest_of(encoded))

    def bucket(self, index: int) -> ArrangedBucket | None:
        """How a bucket may come arranged; None if it must come whole, or does not exist."""
        return self.buckets[index] if index < len(self.buckets) else None


ALL_WHOLE = ArrangedBuckets()


def _arrange_if_smaller(plan: BucketPlan) -> ArrangedBucket | None:
    limit = MAX_PART * sum(tensor.nbytes for tensor in plan.layout.tensors)
    if num_bytes_read(plan) < limit and (arranged := arrange(plan)) is not None:
        return arranged if arranged_nbytes(arranged.arrangement) < limit else None
    return None


def arrange(plan: BucketPlan) -> ArrangedBucket | None:
    """Arrange one bucket; None if a copy of its plan reads across the bounds of a tensor."""
    layout = plan.layout
    pieces: list[tuple[int, StridedCopy]] = []
    read: Counter[int] = Counter()
    for piece in chain.from_iterable(split_copy(copy, layout.starts) for copy in plan.copies):
        tensor = layout.holding(*piece.src_bounds())
        if tensor is None:
            return None
        pieces.append((tensor, piece))
        read[tensor] += _nbytes_read(piece)
    repeated = {tensor for tensor, nbytes in read.items() if nbytes > layout.tensors[tensor].nbytes}
    packing = PackingState(layout)
    placed = {}
    for tensor in sorted(repeated):
        entry = layout.tensors[tensor]
        whole = StridedCopy(0, entry.offset, entry.offset, (), entry.nbytes)
        placed[tensor] = packing.add(whole, tensor).src
    copies = []
    for tensor, piece in sorted(pieces, key=lambda pair: pair[1].src):
        if tensor in placed:
            src = placed[tensor] + piece.src - layout.tensors[tensor].offset
            copies.append(replace(piece, src=src))
        else:
            copies.append(packing.add(piece, tensor))
    return ArrangedBucket(tuple(packing.reads), replace(plan, copies=tuple(coalesce(copies))))


def num_bytes_read(plan: BucketPlan) -> int:
    """A quick estimate of how many bytes an arrangement of this plan would have."""
    return sum(map(_nbytes_read, plan.copies))


class PackingState:
    """The arranged buffer while reads are added to it."""

    def __init__(self, layout: BucketLayout) -> None:
        self.reads: list[Read] = []
        self._layout = layout
        self._stop = 0
        self._starts: dict[tuple[Read, Unit], int] = {}

    def add(self, piece: StridedCopy, tensor: int) -> StridedCopy:
        """Add what `piece` reads, unless it is there already; returns the copy that reads it."""
        ordered, step = sorted(piece.dims, key=lambda dim: dim[1]), piece.run * piece.unit.src_bytes
        within, moves = [], []  # innermost first; what is repeated has stride 0 in the buffer, too
        for count, src, dst in ordered:
            moves.append((count, step if src else 0, dst))
            if src:
                within.append((count, src, step))
                step *= count
        dims, run = collapse(within, piece.run * piece.unit.src_bytes, BYTES)
        offset = piece.src - self._layout.tensors[tensor].offset
        read = Read(tensor, offset, tuple((count, src) for count, src, _ in dims), run, 0)
        start = self._starts.get((read, piece.unit))
        if start is None:
            # This keeps the copy's words, or elements, whole.
            ahead = piece.dst if piece.unit.cast is None else 0
            start = self._stop + (ahead - self._stop) % UNIT_ALIGNMENT
            self._starts[read, piece.unit] = start
            self.reads.append(replace(read, start=start))
            self._stop = start + read.nbytes
        moved, units = collapse(moves, piece.run, piece.unit)
        return StridedCopy(piece.storage, start, piece.dst, moved, units, piece.unit)


def _nbytes_read(copy: StridedCopy) -> int:
    """Bytes of the source; what is repeated counts once."""
    moving = (count for count, src_stride, _ in copy.dims if src_stride)
    return copy.run * copy.unit.src_bytes * math.prod(moving)
