"""From a bucket's plan to its arrangement, and to the plan that reads the arranged buffer.

    arranged = arrange(plan)
    if arranged is not None:
        arrangement, rebased = arranged
        replay_once(rebased, destinations, load_weights, gathered)

The bytes stay in their order, without those between them. Tensors that the model's loader loads, or
that are read more than once, come whole.

Pure: reads a plan, runs nothing. Nobody needs an arrangement before a trainer asks for it; then
`verify.why_misarranged` proves it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias

from sglang_loader.common.collector import collector_paused
from sglang_loader.common.layout import (
    ALIGNMENT_BYTES,
    BucketLayout,
    digest_of,
    encode_arrangements,
    encode_layout,
)
from sglang_loader.common.regions.arrangement import Arrangement, Read, arranged_nbytes
from sglang_loader.common.regions.coalesce import coalesce
from sglang_loader.common.regions.geometry import BYTES, StridedCopy, Unit, collapse, split_copy
from sglang_loader.load_plan.plan import BucketPlan

UNIT_ALIGNMENT = 16
"""No dtype is wider: a copy whose two sides agree modulo this moves words, or whole elements."""

MAX_PART = 0.9
"""A bucket of which more is read comes whole: there is next to nothing to win."""

Arranged: TypeAlias = tuple[Arrangement, BucketPlan]
"""What of a bucket is read, and the plan that reads it where nothing else has come."""


@dataclass(frozen=True)
class ArrangedBuckets:
    """How the buckets of a sync may come.

    Attributes:
        buckets: by bucket; None: it comes whole.
        encoded: their arrangements, as the trainer is told of them (see `layout`); empty: there are
            none.
        digest: names them on the wire; "": there are none.
    """

    buckets: tuple[Arranged | None, ...] = ()
    encoded: bytes = b""
    digest: str = ""

    @classmethod
    def of(cls, plans: Sequence[BucketPlan]) -> ArrangedBuckets:
        """Of the plans of all buckets, in order."""
        buckets = tuple(map(_arrange_if_smaller, plans))
        if not any(buckets):
            return ALL_WHOLE
        layouts = [digest_of(encode_layout(plan.layout)) for plan in plans]
        found = [each and each[0] for each in buckets]
        encoded = encode_arrangements(tuple(zip(layouts, found, strict=True)))
        return cls(buckets, encoded, digest_of(encoded))

    def bucket(self, index: int) -> Arranged | None:
        """How one comes; None: whole, or there is none of this number."""
        return self.buckets[index] if index < len(self.buckets) else None


ALL_WHOLE = ArrangedBuckets()


def _arrange_if_smaller(plan: BucketPlan) -> Arranged | None:
    limit = MAX_PART * sum(tensor.nbytes for tensor in plan.layout.tensors)
    arranged = arrange(plan) if num_bytes_read(plan) < limit else None
    return arranged if arranged is not None and arranged_nbytes(arranged[0]) < limit else None


@collector_paused()
def arrange(plan: BucketPlan) -> Arranged | None:
    """What the plan reads of its bucket, and the plan that reads it from the arranged buffer.

    Returns:
        None where that cannot be said: something is read across the bounds of a tensor.
    """
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
    placed = {tensor: packing.add_whole(tensor) for tensor in sorted({*plan.rest, *repeated})}
    copies = []
    for tensor, piece in sorted(pieces, key=lambda pair: pair[1].src):
        if tensor in placed:
            src = placed[tensor] + piece.src - layout.tensors[tensor].offset
            copies.append(replace(piece, src=src))
        else:
            copies.append(packing.add(piece, tensor))
    rebased = replace(
        plan,
        copies=tuple(coalesce(copies)),
        rest={tensor: placed[tensor] for tensor in plan.rest},
    )
    return tuple(packing.reads), rebased


def num_bytes_read(plan: BucketPlan) -> int:
    """About as many bytes as an arrangement of this plan would have, found much sooner."""
    copied = sum(_nbytes_read(copy) for copy in plan.copies)
    return copied + sum(plan.layout.tensors[i].nbytes for i in plan.rest)


class PackingState:
    """The arranged buffer while it is filled."""

    def __init__(self, layout: BucketLayout) -> None:
        self.reads: list[Read] = []
        self._layout = layout
        self._stop = 0
        self._starts: dict[tuple[Read, Unit], int] = {}

    def add_whole(self, tensor: int) -> int:
        """Send all of a tensor; returns where it starts."""
        entry = self._layout.tensors[tensor]
        start = self._stop + -self._stop % ALIGNMENT_BYTES + entry.offset % UNIT_ALIGNMENT
        self.reads.append(Read(tensor, 0, (), entry.nbytes, start))
        self._stop = start + entry.nbytes
        return start

    def add(self, piece: StridedCopy, tensor: int) -> StridedCopy:
        """Send what `piece` reads, once; returns the copy that moves it on from there."""
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
