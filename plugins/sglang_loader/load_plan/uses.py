"""What a traced `load_weights` made of each tensor of its bucket. Pure: runs nothing.

uses = uses_of(traced)
uses.tensors["model.norm.weight"].dtypes      # of the parameters that its data went to
uses.written["model.norm.weight"]             # the bytes of that storage that were written
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.geometry import Region, region_runs
from sglang_loader.common.regions.intervals import Interval, merge_runs
from sglang_loader.load_plan.host_reads import MEMORY_GIVEN_AWAY
from sglang_loader.load_plan.trace import Space, Step, TensorRef, TracedBucket

_COPY = torch.ops.aten.copy_.default


@dataclass
class TensorUse:
    """What became of one tensor.

    Attributes:
        parts: regions of it that were read; the whole as None.
        dtypes: of the model's tensors that its data went to.
        is_applied: something was made of it that stays.
        is_broadcast: it was repeated to fill what it was copied to.
    """

    parts: set[Region | None] = field(default_factory=set)
    dtypes: set[torch.dtype] = field(default_factory=set)
    is_applied: bool = False
    is_broadcast: bool = False


@dataclass(frozen=True)
class BucketUses:
    """What became of one bucket.

    Attributes:
        layout: of the bucket.
        tensors: by name; one that was not even read is absent.
        written: the model's bytes that were written, by `StorageEntry.name`.
        problem: why that is not all of it; None if it is.
    """

    layout: BucketLayout
    tensors: Mapping[str, TensorUse] = field(default_factory=dict)
    written: Mapping[str, Sequence[Interval]] = field(default_factory=dict)
    problem: str | None = None


def uses_of(traced: TracedBucket) -> BucketUses:
    """The uses of a bucket's tensors in one traced load."""
    return _Reading(traced).uses()


class _Reading:
    """Goes through a trace once, step by step."""

    def __init__(self, traced: TracedBucket) -> None:
        self._layout, self._trace = traced.layout, traced.trace
        self._problems = [*([traced.moved] if traced.moved else []), *traced.trace.problems]
        self._storages = traced.destinations.storages
        self._starts = [tensor.offset for tensor in traced.layout.tensors]
        self._uses: defaultdict[int, TensorUse] = defaultdict(TensorUse)
        self._made_of: defaultdict[tuple[Space, int], frozenset[int]] = defaultdict(frozenset)
        self._written: defaultdict[int, set[Region]] = defaultdict(set)

    def uses(self) -> BucketUses:
        for step in self._trace.steps:
            self._follow(step)
        for read in self._trace.host_reads:  # Python may write it back as a number
            for number in self._origins(read.tensor):
                self._uses[number].is_applied = True
            if read.tensor.space is Space.DESTINATION and read.what in MEMORY_GIVEN_AWAY:
                name = self._storages[read.tensor.index].name
                self._problems.append(f"{name} may be written through its {read.what}, unseen")
        return BucketUses(
            self._layout,
            {self._layout.tensors[number].name: use for number, use in self._uses.items()},
            {
                self._storages[storage].name: merge_runs(map(region_runs, regions))
                for storage, regions in self._written.items()
            },
            next(iter(self._problems), None),
        )

    def _follow(self, step: Step) -> None:
        origins = frozenset[int]().union(*map(self._origins, step.reads))
        if step.op is _COPY and _is_broadcast(*step.args[:2]):
            for number in origins:
                self._uses[number].is_broadcast = True
        for ref in step.writes:
            if 0 in ref.region.shape or ref.space is Space.BUCKET:
                continue
            if ref.space is Space.DESTINATION:
                self._written[ref.index].add(ref.region)
                for number in origins:
                    self._uses[number].is_applied = True
                    self._uses[number].dtypes.add(ref.dtype)
            else:
                self._made_of[ref.space, ref.index] |= origins
        for slot in step.outputs:
            if slot is not None:
                self._made_of[Space.SLOT, slot] |= origins

    def _origins(self, ref: TensorRef) -> frozenset[int]:
        """The bucket's tensors that what is read is part of, or was made of."""
        if ref.space is not Space.BUCKET:
            return self._made_of.get((ref.space, ref.index), frozenset())
        number = bisect_right(self._starts, ref.region.offset) - 1
        tensor, region = self._layout.tensors[number], ref.region
        is_whole = math.prod(region.shape) * region.itemsize >= tensor.nbytes
        within = Region(region.offset - tensor.offset, region.shape, region.stride, region.itemsize)
        self._uses[number].parts.add(None if is_whole else within)
        return frozenset((number,))


def _is_broadcast(target: TensorRef, source: object) -> bool:
    """True if a copy into the model repeats its source."""
    if not isinstance(source, TensorRef) or target.space is not Space.DESTINATION:
        return False
    return math.prod(target.region.shape) != math.prod(source.region.shape)
