"""What a traced `load_weights` made of each tensor of its bucket. Pure: runs nothing.

uses = uses_of(traced)
uses.idle                                     # tensors that nothing was made of
uses.tensors["model.norm.weight"].dtypes      # of the parameters that its data went to
uses.written["model.norm.weight"]             # the bytes of that storage that were written
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.geometry import Region, region_runs
from sglang_loader.common.regions.intervals import Interval, merge_runs
from sglang_loader.load_plan.host_reads import MEMORY_GIVEN_AWAY
from sglang_loader.load_plan.trace import (
    Origins,
    Space,
    Step,
    TensorRef,
    TracedBucket,
    collector_paused,
)

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
        tensors: by name; one that was not even read is absent.
        written: the model's bytes that were written, by `StorageEntry.name`.
        problem: why that is not all of it; None if it is.
    """

    layout: BucketLayout
    tensors: Mapping[str, TensorUse] = field(default_factory=dict)
    written: Mapping[str, Sequence[Interval]] = field(default_factory=dict)
    problem: str | None = None

    @property
    def idle(self) -> list[str]:
        """Tensors with bytes of which nothing was made.

        A loader that needs two tensors in one call (MLA's `q_a_proj` and `kv_a_proj_with_mqa`)
        drops both without a word when a bucket boundary parts them.
        """
        return [
            tensor.name
            for tensor in self.layout.tensors
            if tensor.nbytes
            and not ((use := self.tensors.get(tensor.name)) is not None and use.is_applied)
        ]


@collector_paused()
def uses_of(traced: TracedBucket) -> BucketUses:
    """The uses of a bucket's tensors in one traced load."""
    reading = _Reading(traced.layout)
    for step in traced.steps:
        reading.follow(step)
    problems = list(traced.problems)
    storages = traced.destinations.storages
    for read in traced.host_reads:  # Python may write it back as a number
        reading.note_applied(read.tensor)
        if read.tensor.space is Space.DESTINATION and read.what in MEMORY_GIVEN_AWAY:
            name = storages[read.tensor.index].name
            problems.append(f"{name} may be written through its {read.what}, unseen")
    return BucketUses(
        traced.layout,
        {traced.layout.tensors[number].name: use for number, use in reading.uses.items()},
        {
            storages[storage].name: merge_runs(map(region_runs, regions))
            for storage, regions in reading.written.items()
        },
        next(iter(problems), None),
    )


class _Reading:
    """Goes through a trace once, step by step.

    Attributes:
        uses: by the tensor's position in the layout.
        written: regions of each destination storage.
    """

    def __init__(self, layout: BucketLayout) -> None:
        self.uses: defaultdict[int, TensorUse] = defaultdict(TensorUse)
        self.written: defaultdict[int, set[Region]] = defaultdict(set)
        self._layout = layout
        self._origins = Origins()

    def follow(self, step: Step) -> None:
        for ref in step.reads:
            if ref.space is Space.BUCKET:
                self._note_read(ref)
        used = self._uses_among(self._origins.follow(step))
        if step.op is _COPY and _is_broadcast(*step.args[:2]):
            for use in used:
                use.is_broadcast = True
        for ref in step.writes:
            if ref.space is Space.DESTINATION and 0 not in ref.region.shape:
                self.written[ref.index].add(ref.region)
                for use in used:
                    use.is_applied = True
                    use.dtypes.add(ref.dtype)

    def note_applied(self, ref: TensorRef) -> None:
        """Something that is not seen is made of it."""
        for use in self._uses_among(self._origins.of(ref)):
            use.is_applied = True

    def _uses_among(self, origins: Sequence[TensorRef]) -> list[TensorUse]:
        places = (origin.region.offset for origin in origins if origin.space is Space.BUCKET)
        return [self.uses[number] for number in set(map(self._layout.tensor_at, places))]

    def _note_read(self, ref: TensorRef) -> None:
        number, region = self._layout.tensor_at(ref.region.offset), ref.region
        tensor = self._layout.tensors[number]
        is_whole = math.prod(region.shape) * region.itemsize >= tensor.nbytes
        within = None if is_whole else replace(region, offset=region.offset - tensor.offset)
        self.uses[number].parts.add(within)


def _is_broadcast(target: TensorRef, source: object) -> bool:
    """True if a copy into the model repeats its source."""
    if not isinstance(source, TensorRef) or target.space is not Space.DESTINATION:
        return False
    return math.prod(target.region.shape) != math.prod(source.region.shape)
