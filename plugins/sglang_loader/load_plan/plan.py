"""The compiled load plan: how to load each bucket so that every byte lands where the model's own
loader puts it.

A `LoadPlan` is made once (`compiler`), executed many times (`executor`), and for each bucket holds

- `copies`: strided copies straight from the bucket into destination storages, in any order, no byte
  written twice, and into the scratch buffer;
- `rest`: the tensors that the loader does not only copy (it adds them, derives a buffer, calls
  `cat`): it loads them itself, after the copies, from the scratch buffer.

Its `coverage` are the bytes of the model that a whole sync is proven to overwrite.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.geometry import StridedCopy
from sglang_loader.common.regions.intervals import Interval
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.trace import TensorRef

LoadWeights: TypeAlias = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""A model's own `load_weights`: takes `(name, tensor)` pairs."""


SCRATCH = -1
"""`StridedCopy.storage` of a copy to the scratch buffer, beside the numbers of storages."""


class PlanRefused(RuntimeError):
    """No plan can be made; the text says why, for a log. The weights are as the model's own
    `load_weights` leaves them, so the caller goes on eagerly.
    """


@dataclass(frozen=True, slots=True)
class DerivedWrite:
    """A step that computes parts of the model from other parts of it, or from nothing."""

    op: torch._ops.OpOverload
    targets: tuple[TensorRef, ...]
    sources: frozenset[TensorRef]


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """How to load one bucket.

    Attributes:
        rest: tensors that `load_weights` loads, where they lie in the scratch buffer. `copies`
            bring them there: the loader may change what it gets.
        written: by destination storage the byte ranges that this bucket surely overwrites.
        live_in: by destination storage the byte ranges of which the loading of `rest` reads the old
            content.
        writes: by destination storage the byte ranges that the bucket's tensors may be written to.
        left_out: the derived writes of `load_weights` that the plan does not repeat.
        recomputed: derived writes that a replay does, as they depend on tensors of this bucket; no
            later step of it writes their targets or sources.
        host_reads: `(what, storage, byte range)` of the model's data that reached Python: harmless
            only if no sync ever writes it.
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
    """The plans of all buckets of a sync, in order, and what holds for the sync as a whole.

    Attributes:
        coverage: by `StorageEntry.name` the sorted byte ranges that a sync overwrites without
            reading them first.
        name: of this plan alone, in all processes.
    """

    buckets: tuple[BucketPlan, ...]
    coverage: Mapping[str, tuple[Interval, ...]]
    destinations: Destinations = field(repr=False)
    name: str = field(default_factory=partial(secrets.token_hex, 8), compare=False)

    @property
    def num_copies(self) -> int:
        """Copies of a sync to the model."""
        copies = (copy for bucket in self.buckets for copy in bucket.copies)
        return sum(copy.storage != SCRATCH for copy in copies)

    @property
    def num_rest(self) -> int:
        """Tensors of a sync that the model's loader loads."""
        return sum(len(bucket.rest.tensors) for bucket in self.buckets)
