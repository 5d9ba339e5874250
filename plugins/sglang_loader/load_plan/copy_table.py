"""The copy table of an engine rank: the join of its load plan with the trainer's weight map.

    (shard of a trainer rank, strided bytes)  ->  (storage of the model, strided bytes, cast)

The load plan copies from buckets to the model, and the weight map places the buckets in the trainer
ranks' shards. `CopyTable.of` joins both once. After that no bucket plays a part in a pulled sync:
the executor runs the table's steps, each in one launch. Pure.

A step ends behind a bucket whose `rest` goes through `load_weights`, because later copies may
overwrite what `load_weights` writes. A step also ends before a bucket that writes a byte that the
step has written, because the copies of one launch run in any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_loader.common.bucket_source import CopyFrom
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.intervals import Interval, merge, num_bytes
from sglang_loader.common.weight_map import WeightMap
from sglang_loader.load_plan.plan import NO_TENSORS, LoadPlan


@dataclass(frozen=True, slots=True)
class TableStep:
    """The copies of one launch, and the tensors that `load_weights` loads then.

    Attributes:
        copies: each with the number of the shard that it reads. No two write the same byte.
        rest: the layout of these tensors in the scratch buffer, as of `BucketPlan.rest`.
    """

    copies: tuple[CopyFrom, ...]
    rest: BucketLayout


@dataclass(frozen=True)
class CopyTable:
    """The copies of a whole sync from the trainer ranks' shards, in steps that run in order."""

    steps: tuple[TableStep, ...]

    @classmethod
    def of(cls, plan: LoadPlan, weight_map: WeightMap) -> CopyTable:
        """Join a load plan with the map of the same buckets.

        Raises:
            ValueError: the map has other buckets, or lacks bytes that the plan reads.
        """
        steps: list[TableStep] = []
        copies: list[CopyFrom] = []
        written: dict[int, list[Interval]] = {}
        pairs = zip(plan.buckets, weight_map.layouts, weight_map.buckets, strict=True)
        for index, (bucket, layout, places) in enumerate(pairs):
            if bucket.layout != layout:
                raise ValueError(f"bucket {index} has another layout than the plan's")
            if copies and _meet(written, bucket.written):
                steps.append(TableStep(tuple(copies), NO_TENSORS))
                copies, written = [], {}
            copies += [part for copy in bucket.copies for part in places.copies(copy)]
            for storage, ranges in bucket.written.items():
                written[storage] = merge([*written.get(storage, ()), *ranges])
            if bucket.rest.tensors:
                steps.append(TableStep(tuple(copies), bucket.rest))
                copies, written = [], {}
        if copies:
            steps.append(TableStep(tuple(copies), NO_TENSORS))
        return cls(tuple(steps))


def _meet(
    first: Mapping[int, Sequence[Interval]], second: Mapping[int, Sequence[Interval]]
) -> bool:
    """Return True if a byte is in both sets of ranges."""
    for storage in first.keys() & second.keys():
        ranges = [*first[storage], *second[storage]]
        if num_bytes(merge(ranges)) < num_bytes(ranges):
            return True
    return False
