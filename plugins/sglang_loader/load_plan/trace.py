"""What a trace is made of: operator calls whose tensors are places in memory.

The nouns between `tracer` (which records them) and `compiler` (which turns them into a plan).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.op_traits import OpTraits
from sglang_loader.common.regions.geometry import Region
from sglang_loader.load_plan.destinations import Destinations


class Space(Enum):
    """Where a referenced tensor's memory lies."""

    BUCKET = "bucket"
    DESTINATION = "destination"
    SLOT = "slot"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as a place in memory: `index` numbers the storage within its space."""

    space: Space
    index: int
    dtype: torch.dtype
    region: Region


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """The same lists, tuples and dicts of `change(leaf)`: arguments of an operator."""
    if isinstance(value, list):
        return [map_leaves(change, item) for item in value]
    if isinstance(value, tuple):
        return tuple([map_leaves(change, item) for item in value])
    if isinstance(value, dict):
        return {key: map_leaves(change, item) for key, item in value.items()}
    return change(value)


def leaves(value: Any) -> list[Any]:
    """What stands in lists, tuples and dicts, in order: arguments or results of an operator."""
    if not isinstance(value, (list, tuple, dict)):
        return [value]
    found: list[Any] = []
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (list, tuple, dict)):
            found += leaves(item)
        else:
            found.append(item)
    return found


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collections: a trace is a million small objects without cycles, as is what is made
    of it. They would take a third of the tracing and a fifth of the proof.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded operator call. Tensors in `args`, the positional ones, are `TensorRef`s;
    `outputs` numbers the slots that its flattened outputs created (None for outputs that alias
    something known).
    """

    op: torch._ops.OpOverload
    traits: OpTraits
    args: tuple[Any, ...]
    reads: tuple[TensorRef, ...]
    writes: tuple[TensorRef, ...]
    outputs: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class HostRead:
    """Tensor data that reached Python: a plan cannot replay what was decided with it."""

    what: str
    tensor: TensorRef


@dataclass
class TracedBucket:
    """One bucket, and everything that its `load_weights` did with tensors.

    Attributes:
        destinations: the model's storages at that time.
        steps: in order.
        problems: why that is not all, or cannot be planned.
    """

    layout: BucketLayout
    destinations: Destinations
    steps: list[Step] = field(default_factory=list)
    host_reads: list[HostRead] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


_MEMORY = (Space.BUCKET, Space.DESTINATION)


class Origins:
    """What data was made of, bytes of the bucket and of the model: follows a trace in order."""

    def __init__(self) -> None:
        self._made_of: dict[tuple[Space, int], tuple[TensorRef, ...]] = {}

    def of(self, ref: TensorRef) -> tuple[TensorRef, ...]:
        """Parts of the bucket and of the model that went into a tensor."""
        if ref.space in _MEMORY:
            return (ref,)
        return self._made_of.get((ref.space, ref.index), ())

    def follow(self, step: Step) -> tuple[TensorRef, ...]:
        """The next step; returns the origins of all that it reads."""
        found = tuple(origin for ref in step.reads for origin in self.of(ref))
        made = [(w.space, w.index) for w in step.writes if w.space not in _MEMORY]
        made += [(Space.SLOT, slot) for slot in step.outputs if slot is not None]
        for key in made:
            self._made_of[key] = tuple(dict.fromkeys((*self._made_of.get(key, ()), *found)))
        return found
