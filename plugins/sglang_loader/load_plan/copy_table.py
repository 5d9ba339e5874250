"""The copy table of an engine rank: the join of its load plan with the trainer's weight map.

    (shard of a trainer rank, strided bytes)  ->  (storage of the model, strided bytes, cast)

The load plan copies from buckets to the model, and the weight map places the buckets in the trainer
ranks' shards. `CopyTable.of` joins both once. After that no bucket plays a part in a pulled sync:
the executor runs the table's steps, each in few launches. Pure.

A step ends behind a bucket whose `rest` goes through `load_weights`, because later copies may
overwrite what `load_weights` writes. A step also ends before a bucket that writes a byte that the
step has written, because the copies of one launch run in any order.

If the engine is served in fp8, a step copies the bytes before quantisation into scratch memory,
quantises them there, and copies the results into the model (`quantized_copies`). Such a step ends
when its scratch memory is full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_loader.common.bucket_source import CopyFrom
from sglang_loader.common.copies.quantizer import Matrix
from sglang_loader.common.layout import ALIGNMENT_BYTES, BucketLayout
from sglang_loader.common.quantization import Quantization
from sglang_loader.common.regions.coalesce import coalesce
from sglang_loader.common.regions.geometry import StridedCopy
from sglang_loader.common.regions.intervals import Interval, merge, num_bytes
from sglang_loader.common.weight_map import WeightMap
from sglang_loader.load_plan.plan import NO_TENSORS, LoadPlan
from sglang_loader.load_plan.quantized_copies import Strip, divided


@dataclass(frozen=True, slots=True)
class QuantizedPart:
    """The part of a step that is quantised, after the copies of the step.

    Attributes:
        matrices: in scratch memory, to which the copies of the step have brought them.
        copies: from the scratch memory. No two write the same byte.
        nbytes: the end of the scratch memory that they need.
    """

    quantization: Quantization
    matrices: tuple[Matrix, ...]
    copies: tuple[StridedCopy, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class TableStep:
    """The copies that run in any order, what is quantised then, and what `load_weights` loads then.

    Attributes:
        copies: each with the number of the shard that it reads. No two write the same byte.
        rest: the layout of these tensors in the scratch memory, as of `BucketPlan.rest`.
        quantized: None if nothing is quantised.
    """

    copies: tuple[CopyFrom, ...]
    rest: BucketLayout
    quantized: QuantizedPart | None = None


@dataclass(frozen=True)
class CopyTable:
    """The copies of a whole sync from the trainer ranks' shards, in steps that run in order."""

    steps: tuple[TableStep, ...]

    @classmethod
    def of(cls, plan: LoadPlan, weight_map: WeightMap, limit: int) -> CopyTable:
        """Join a load plan with the map of the same buckets.

        Args:
            limit: about the largest number of bytes that are quantised in one step.

        Raises:
            ValueError: the map has other buckets, or lacks bytes that the plan reads.
        """
        steps: list[TableStep] = []
        largest_rest = max((bucket.rest.nbytes for bucket in plan.buckets), default=0)
        # The scratch memory begins with room for the largest `rest`. What is quantised comes after.
        step = _OpenStep(-(-largest_rest // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        pairs = zip(plan.buckets, weight_map.layouts, weight_map.buckets, strict=True)
        for index, (bucket, layout, places) in enumerate(pairs):
            if bucket.layout != layout:
                raise ValueError(f"bucket {index} has another layout than the plan's")
            # Copies of one step run in any order, and here the later bucket must win.
            if step.copies and _meet(step.written, bucket.written):
                steps.append(step.end(NO_TENSORS))
            copies: Sequence[StridedCopy] = bucket.copies
            strips: Sequence[Strip] = ()
            # A quantised tensor has no bytes in any shard. Its blocks are made of other bytes.
            if weight_map.quantized is not None:
                copies, strips = divided(bucket.copies, layout, weight_map.quantized, limit)
            step.copies += [part for copy in copies for part in places.copies(copy)]
            # The bytes before quantisation need scratch memory, of which there is a limit.
            for strip in strips:
                if step.matrices and step.source_bytes + strip.source_bytes > limit:
                    steps.append(step.end(NO_TENSORS))
                step.add(strip)
            for storage, ranges in bucket.written.items():
                step.written[storage] = merge([*step.written.get(storage, ()), *ranges])
            # `load_weights` may read what earlier copies write, and later copies may overwrite it.
            if bucket.rest.tensors:
                steps.append(step.end(bucket.rest))
        if step.copies:
            steps.append(step.end(NO_TENSORS))
        return cls(tuple(steps))


class _OpenStep:
    """A step of a table while buckets are added. After `end` it is the next step.

    Args:
        scratch_start: the first byte of the scratch memory that is not for a `rest`.

    Attributes:
        written: the bytes that the step may have written, by storage.
        source_bytes: the bytes that are quantised in this step.
    """

    def __init__(self, scratch_start: int) -> None:
        self._scratch_start = scratch_start
        self._begin()

    def _begin(self) -> None:
        self.copies: list[CopyFrom] = []
        self.written: dict[int, list[Interval]] = {}
        self.matrices: list[Matrix] = []
        self.source_bytes = 0
        self._results: list[StridedCopy] = []
        self._quantization: Quantization | None = None
        self._scratch_stop = self._scratch_start

    def add(self, strip: Strip) -> None:
        """Add blocks that are quantised."""
        matrix, self._scratch_stop = strip.matrix_at(self._scratch_stop)
        self.matrices.append(matrix)
        self.source_bytes += strip.source_bytes
        self.copies += strip.reads(matrix)
        self._results += strip.writes(matrix)
        self._quantization = strip.quantized.quantization

    def end(self, rest: BucketLayout) -> TableStep:
        """Return the step."""
        quantized = None
        if self._quantization is not None:
            results = tuple(coalesce(self._results))
            quantized = QuantizedPart(
                self._quantization, tuple(self.matrices), results, self._scratch_stop
            )
        step = TableStep(tuple(self.copies), rest, quantized)
        self._begin()
        return step


def _meet(
    first: Mapping[int, Sequence[Interval]], second: Mapping[int, Sequence[Interval]]
) -> bool:
    """Return True if a byte is in both sets of ranges."""
    for storage in first.keys() & second.keys():
        ranges = [*first[storage], *second[storage]]
        # Ranges with a common byte merge to fewer bytes.
        if num_bytes(merge(ranges)) < num_bytes(ranges):
            return True
    return False
