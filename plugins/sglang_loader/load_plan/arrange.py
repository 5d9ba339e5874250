"""From a bucket's load plan to its arrangement and to the plan for the arranged buffer. Pure.

    arranged = arrange(plan)
    if arranged is not None:
        replay_once(arranged.plan, destinations, load_weights, gathered)

The arranged bytes are in the order of the bucket. A tensor that is read more than once comes whole.
Arrangements are made when a trainer first asks for them. `verify.arrangement_difference` checks
them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from sglang_loader.common.layout import BucketLayout, digest_of, encode_arrangements, encode_layout
from sglang_loader.common.regions.arrangement import Arrangement, Read, arranged_nbytes
from sglang_loader.common.regions.coalesce import coalesce
from sglang_loader.common.regions.geometry import BYTES, StridedCopy, Unit, collapse, split_copy
from sglang_loader.load_plan.plan import BucketPlan

UNIT_ALIGNMENT = 16
"""Size of the widest dtype. A copy whose two sides agree modulo this moves words or elements."""

MAX_PART = 0.9
"""The largest part of a bucket that is arranged. Beyond this, there is next to nothing to win."""


class ArrangedBucket(NamedTuple):
    """The part of a bucket that this rank reads, and the plan that loads this part."""

    arrangement: Arrangement
    plan: BucketPlan


@dataclass(frozen=True)
class ArrangedBuckets:
    """The arrangements of a sync's buckets.

    Attributes:
        buckets: for each bucket its arrangement and plan, or None if the bucket must come whole.
        encoded: the arrangements for the trainer (see `layout`), empty if there are none.
        digest: the name of the arrangements in messages, "" if there are none.
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
        arrangements = [bucket and bucket.arrangement for bucket in buckets]
        encoded = encode_arrangements(tuple(zip(layouts, arrangements, strict=True)))
        return cls(buckets, encoded, digest_of(encoded))

    def bucket(self, index: int) -> ArrangedBucket | None:
        """Return a bucket's arrangement and plan, or None if the bucket has none."""
        return self.buckets[index] if index < len(self.buckets) else None


ALL_WHOLE = ArrangedBuckets()


def _arrange_if_smaller(plan: BucketPlan) -> ArrangedBucket | None:
    limit = MAX_PART * sum(tensor.nbytes for tensor in plan.layout.tensors)
    if num_bytes_read(plan) < limit and (arranged := arrange(plan)) is not None:
        return arranged if arranged_nbytes(arranged.arrangement) < limit else None
    return None


def arrange(plan: BucketPlan) -> ArrangedBucket | None:
    """Arrange one bucket. Return None if a copy of its plan reads across the bounds of a tensor."""
    # Cut the copies at the bounds of tensors, and count how much of each tensor they read.
    layout = plan.layout
    copies_by_tensor: list[tuple[int, StridedCopy]] = []
    num_read: Counter[int] = Counter()
    for copy in chain.from_iterable(split_copy(copy, layout.starts) for copy in plan.copies):
        tensor = layout.holding(*copy.src_bounds())
        if tensor is None:
            return None
        copies_by_tensor.append((tensor, copy))
        num_read[tensor] += _nbytes_read(copy)
    repeated = {
        tensor for tensor, nbytes in num_read.items() if nbytes > layout.tensors[tensor].nbytes
    }
    # A tensor that is read more than once comes whole, and first.
    packing = PackingState(layout)
    placed = {}
    for tensor in sorted(repeated):
        entry = layout.tensors[tensor]
        whole = StridedCopy(0, entry.offset, entry.offset, (), entry.nbytes)
        placed[tensor] = packing.add(whole, tensor).src
    # All other reads follow in the order of the bucket.
    copies = []
    for tensor, copy in sorted(copies_by_tensor, key=_source_start):
        if tensor in placed:
            src = placed[tensor] + copy.src - layout.tensors[tensor].offset
            copies.append(replace(copy, src=src))
        else:
            copies.append(packing.add(copy, tensor))
    return ArrangedBucket(tuple(packing.reads), replace(plan, copies=tuple(coalesce(copies))))


def _source_start(copy_of_tensor: tuple[int, StridedCopy]) -> int:
    return copy_of_tensor[1].src


def num_bytes_read(plan: BucketPlan) -> int:
    """Estimate quickly how many bytes an arrangement of this plan would have."""
    return sum(map(_nbytes_read, plan.copies))


class PackingState:
    """The arranged buffer while reads are added."""

    def __init__(self, layout: BucketLayout) -> None:
        self.reads: list[Read] = []
        self._layout = layout
        self._stop = 0
        self._starts: dict[tuple[Read, Unit], int] = {}

    def add(self, copy: StridedCopy, tensor: int) -> StridedCopy:
        """Add the bytes that a copy reads, unless they are there already.

        Returns:
            The copy that reads these bytes in the arranged buffer.
        """
        ordered, step = sorted(copy.dims, key=itemgetter(1)), copy.run * copy.unit.src_bytes
        # Innermost first. A dimension with source stride 0 has stride 0 in the buffer, too.
        within, moves = [], []
        for count, src, dst in ordered:
            moves.append((count, step if src else 0, dst))
            if src:
                within.append((count, src, step))
                step *= count
        dims, run = collapse(within, copy.run * copy.unit.src_bytes, BYTES)
        offset = copy.src - self._layout.tensors[tensor].offset
        read = Read(tensor, offset, tuple((count, src) for count, src, _ in dims), run, 0)
        start = self._starts.get((read, copy.unit))
        if start is None:
            # This keeps the copy's words, or elements, whole.
            ahead = copy.dst if copy.unit.cast is None else 0
            start = self._stop + (ahead - self._stop) % UNIT_ALIGNMENT
            self._starts[read, copy.unit] = start
            self.reads.append(replace(read, start=start))
            self._stop = start + read.nbytes
        moved, units = collapse(moves, copy.run, copy.unit)
        return StridedCopy(copy.storage, start, copy.dst, moved, units, copy.unit)


def _nbytes_read(copy: StridedCopy) -> int:
    """Return the bytes of the source. A byte that is repeated counts once."""
    moving = (count for count, src_stride, _ in copy.dims if src_stride)
    return copy.run * copy.unit.src_bytes * math.prod(moving)
