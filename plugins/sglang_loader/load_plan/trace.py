"""The data of a trace: operator calls whose tensors are places in memory.

`tracer` records a trace, and `compiler` turns a trace into a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.op_traits import OpTraits
from sglang_loader.common.regions.geometry import Region
from sglang_loader.load_plan.destinations import Destinations


class Space(Enum):
    """The kind of memory in which a referenced tensor lies."""

    BUCKET = "bucket"
    DESTINATION = "destination"
    TEMPORARY = "temporary"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as a place in memory. `index` is the number of the storage within its space."""

    space: Space
    index: int
    dtype: torch.dtype
    region: Region


def in_space(refs: Iterable[TensorRef], space: Space) -> list[TensorRef]:
    return [ref for ref in refs if ref.space is space]


_MEMORY = (Space.BUCKET, Space.DESTINATION)


class Origins:
    """The parts of the bucket and of the model that went into each tensor of a load."""

    def __init__(self) -> None:
        self._made_of: dict[tuple[Space, int], tuple[TensorRef, ...]] = {}

    def of(self, ref: TensorRef) -> tuple[TensorRef, ...]:
        """Return the parts of the bucket and of the model that went into `ref`."""
        if ref.space in _MEMORY:
            return (ref,)
        return self._made_of.get((ref.space, ref.index), ())

    def has(self, temporary: int) -> bool:
        """Return True if any part of the bucket or of the model went into a temporary."""
        return bool(self._made_of.get((Space.TEMPORARY, temporary)))

    def follow(
        self, reads: Sequence[TensorRef], writes: Sequence[TensorRef]
    ) -> tuple[TensorRef, ...]:
        """Record the next step, and return the origins of all tensors that the step reads."""
        origins = tuple([origin for ref in reads for origin in self.of(ref)])
        for key in [(ref.space, ref.index) for ref in writes if ref.space not in _MEMORY]:
            self._made_of[key] = tuple(dict.fromkeys((*self._made_of.get(key, ()), *origins)))
        return origins


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded operator call.

    Attributes:
        writes: including the temporaries that the call made.
        origins: parts of the bucket and of the model that the call reads, also through temporaries.
    """

    op: torch._ops.OpOverload
    traits: OpTraits
    reads: tuple[TensorRef, ...]
    writes: tuple[TensorRef, ...]
    origins: tuple[TensorRef, ...]

    @property
    def copied(self) -> tuple[TensorRef, TensorRef] | None:
        """The source and target of a copy. None if the call is no copy."""
        is_copy = self.op is torch.ops.aten.copy_.default
        return (self.reads[0], self.writes[0]) if is_copy else None


@dataclass
class TracedBucket:
    """One bucket, and everything that its `load_weights` did with tensors.

    Attributes:
        destinations: the model's storages at that time.
        steps: in order.
        origins: of the temporaries, after the last step.
        host_reads: methods by which tensor data reached Python, and the tensors. A plan cannot
            replay decisions that depend on this data.
        problems: the reasons why no plan can be made of this bucket.
    """

    layout: BucketLayout
    destinations: Destinations
    steps: list[Step] = field(default_factory=list)
    origins: Origins = field(default_factory=Origins)
    host_reads: list[tuple[str, TensorRef]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
