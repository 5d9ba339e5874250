"""The compiled load plan: how to load each bucket so that every byte lands in its place.

A byte's place is where the model's own `load_weights` puts the byte. A `LoadPlan` is made once
(`compiler`) and executed many times (`executor`). For each bucket it holds

- `copies`: strided copies from the bucket into destination storages and into the scratch buffer, in
  any order, no byte written twice.
- `rest`: the tensors that `load_weights` does not only copy. It may add them, derive a buffer, or
  call `cat`. After the copies `load_weights` itself loads these tensors, from the scratch buffer.

The plan's `coverage` is the bytes of the model that a whole sync is proven to overwrite.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.geometry import StridedCopy
from sglang_loader.common.regions.intervals import Interval
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.trace import TensorRef

LoadWeights: TypeAlias = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""A model's own `load_weights`. The argument is `(name, tensor)` pairs."""


NO_TENSORS = BucketLayout((), 0)
"""The `rest` of a plan that leaves nothing to `load_weights`."""

SCRATCH = -1
"""`StridedCopy.storage` of a copy to the scratch buffer, beside the numbers of storages."""


class PlanRefused(RuntimeError):
    """A load that has no plan. The text is the reason, for a log.

    The weights are as the model's own `load_weights` leaves them. The caller goes on eagerly.
    """


@dataclass(frozen=True, slots=True)
class DerivedWrite:
    """A step that computes parts of the model from other parts of the model, or from nothing."""

    op: torch._ops.OpOverload
    targets: tuple[TensorRef, ...]
    sources: frozenset[TensorRef]


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The plan of one bucket.

    Attributes:
        layout: of the bucket.
        copies: to the destination storages and to the scratch buffer.
        rest: the layout, in the scratch buffer, of the tensors that `load_weights` loads. `copies`
            bring the tensors there, because `load_weights` may change its arguments.
        written: by destination storage, the byte ranges that this bucket surely overwrites.
        live_in: by destination storage, the byte ranges of which loading `rest` reads the old
            content.
        writes: by destination storage, the byte ranges that the bucket's tensors may be written to.
        left_out: the derived writes of `load_weights` that the plan does not repeat.
        recomputed: derived writes that a replay repeats, because they depend on tensors of this
            bucket. No later step of the bucket writes their targets or sources.
        host_reads: `(method, storage, byte range)` of the model's data that reached Python. They
            are harmless only if no sync ever writes this data.
    """

    layout: BucketLayout
    copies: tuple[StridedCopy, ...]
    rest: BucketLayout
    written: Mapping[int, tuple[Interval, ...]]
    live_in: Mapping[int, tuple[Interval, ...]]
    writes: Mapping[int, tuple[Interval, ...]]
    left_out: tuple[DerivedWrite, ...]
    recomputed: frozenset[DerivedWrite]
    host_reads: tuple[tuple[str, int, Interval], ...]

    @property
    def touched(self) -> set[int]:
        """Destination storages that `load_weights` may write to."""
        return {*self.writes, *(ref.index for step in self.left_out for ref in step.targets)}


@dataclass(frozen=True)
class LoadPlan:
    """The plans of all buckets of a sync, in order, and the facts about the sync as a whole.

    Attributes:
        buckets: in order.
        coverage: by `StorageEntry.name`, the sorted byte ranges that a sync overwrites without
            reading them first.
        destinations: the storages that the plan writes to.
        name: unique among all plans of all processes.
    """

    buckets: tuple[BucketPlan, ...]
    coverage: Mapping[str, tuple[Interval, ...]]
    destinations: Destinations = field(repr=False)
    name: str = field(default_factory=partial(secrets.token_hex, 8), compare=False)

    @property
    def num_copies(self) -> int:
        """The number of copies of a sync to the model."""
        copies = (copy for bucket in self.buckets for copy in bucket.copies)
        return sum(copy.storage != SCRATCH for copy in copies)

    @cached_property
    def num_rest(self) -> int:
        """The number of tensors of a sync that `load_weights` loads."""
        return sum(len(bucket.rest.tensors) for bucket in self.buckets)
