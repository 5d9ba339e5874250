"""The use that a traced `load_weights` made of each tensor of its bucket. Pure: runs nothing.

uses = uses_of(traced)
uses.unused                                   # names of tensors that did not change the model
uses.tensors["model.norm.weight"].dtypes      # of the parameters that its data went to
uses.written["model.norm.weight"]             # the bytes of that storage that were written
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from sglang_loader.common.layout import BucketLayout, BucketTensor
from sglang_loader.common.regions.geometry import Region
from sglang_loader.common.regions.intervals import Interval, merge_runs
from sglang_loader.load_plan.host_reads import MEMORY_GIVEN_AWAY
from sglang_loader.load_plan.trace import Space, Step, TensorRef, TracedBucket, in_space


@dataclass
class TensorUse:
    """The use of one tensor of a bucket.

    Attributes:
        parts: regions of the tensor that were read. None stands for the whole tensor.
        dtypes: of the model's tensors that the data went to.
        is_applied: the data, or a result computed from the data, was written to the model.
        is_broadcast: a copy repeated the tensor to fill a larger destination.
    """

    parts: set[Region | None] = field(default_factory=set)
    dtypes: set[torch.dtype] = field(default_factory=set)
    is_applied: bool = False
    is_broadcast: bool = False


@dataclass(frozen=True)
class BucketUses:
    """The uses of the tensors of one bucket.

    Attributes:
        tensors: by name, without tensors that were not read.
        written: the model's bytes that were written, by `StorageEntry.name`.
        problem: the reason why the uses may be incomplete, or None.
        contents: by name, a text that is the same for tensors of the same shape, dtype and bytes.
            Only tensors with an embedding's shape have one.
    """

    layout: BucketLayout
    tensors: Mapping[str, TensorUse] = field(default_factory=dict)
    written: Mapping[str, Sequence[Interval]] = field(default_factory=dict)
    problem: str | None = None
    contents: Mapping[str, str] = field(default_factory=dict)

    @property
    def unused(self) -> list[str]:
        """The names of tensors, except for empty ones, that were not applied.

        A loader that needs two tensors in one call (MLA's `q_a_proj` and `kv_a_proj_with_mqa`)
        silently drops both when a bucket boundary parts them.
        """
        applied = {name for name, use in self.tensors.items() if use.is_applied}
        return [t.name for t in self.layout.tensors if t.nbytes and t.name not in applied]


def merged_contents(uses: Iterable[BucketUses]) -> dict[str, str]:
    """Return the contents of all buckets, see `BucketUses`."""
    return {name: content for bucket in uses for name, content in bucket.contents.items()}


def tied_tensors(contents: Mapping[str, str], unused: Collection[str]) -> dict[str, str]:
    """Return the unused tensors that have the bytes of a used one, each with the used one.

    Args:
        contents: of all buckets.
        unused: the names of all tensors that are not used.
    """
    used = {content: name for name, content in contents.items() if name not in unused}
    dropped = ((name, content) for name, content in contents.items() if name in unused)
    return {name: used[content] for name, content in dropped if content in used}


def uses_of(traced: TracedBucket) -> BucketUses:
    """Return the uses of a bucket's tensors in one traced load."""
    layout, storages = traced.layout, traced.destinations.storages
    uses: defaultdict[int, TensorUse] = defaultdict(TensorUse)  # by position in the layout
    written: defaultdict[int, set[Region]] = defaultdict(set)  # of each destination storage

    def uses_among(origins: Sequence[TensorRef]) -> list[TensorUse]:
        places = (origin.region.offset for origin in origins if origin.space is Space.BUCKET)
        return [uses[number] for number in set(map(layout.tensor_at, places))]

    for step in traced.steps:
        for ref in in_space(step.reads, Space.BUCKET):
            number = layout.tensor_at(ref.region.offset)
            uses[number].parts.add(_part_of(layout.tensors[number], ref.region))
        # The step applies all tensors that went into it, also through temporaries.
        targets = in_space(step.writes, Space.DESTINATION)
        targets = [ref for ref in targets if 0 not in ref.region.shape]
        for ref in targets:
            written[ref.index].add(ref.region)
        for use in uses_among(step.origins) if targets else ():
            use.is_applied = True
            use.dtypes.update(ref.dtype for ref in targets)
            use.is_broadcast = use.is_broadcast or _is_broadcast(step)
    problems = list(traced.problems)
    for method, tensor in traced.host_reads:  # Python may write the data back as a number
        for use in uses_among(traced.origins.of(tensor)):
            use.is_applied = True
        if tensor.space is Space.DESTINATION and method in MEMORY_GIVEN_AWAY:
            name = storages[tensor.index].name
            problems.append(f"{name} may be written through its {method}, unseen")
    return BucketUses(
        layout,
        {layout.tensors[number].name: use for number, use in uses.items()},
        {storages[i].name: merge_runs(map(Region.runs, parts)) for i, parts in written.items()},
        next(iter(problems), None),
    )


def _part_of(tensor: BucketTensor, read: Region) -> Region | None:
    """Return the region read, its offset counted from the tensor's start. None stands for all."""
    is_whole = math.prod(read.shape) * read.itemsize >= tensor.nbytes
    return None if is_whole else replace(read, offset=read.offset - tensor.offset)


def _is_broadcast(step: Step) -> bool:
    """Return True for a copy that repeats its source."""
    return step.copied is not None and len({math.prod(x.region.shape) for x in step.copied}) > 1
