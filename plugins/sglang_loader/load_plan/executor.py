"""Replays a load plan: a few fused copies per bucket, then its tape. Launches work, never waits for
it.

    executor = PlanExecutor(plan)
    executor.replay(0, BucketSource.flat(staging))      # on the current stream; the caller
    synchronises

Binding (turning descriptors into tensors that view concrete memory) is done once per bucket and
source address. A binding keeps its source's memory alive; `unbind` lets go of it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.copies import copy_views
from sglang_loader.common.copy_kernel import WORD, BatchedCopy, is_available
from sglang_loader.common.regions.geometry import StridedCopy
from sglang_loader.common.regions.intervals import Interval, merge
from sglang_loader.common.shared_memory import peer_of
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.plan import BucketPlan, LoadPlan, TapeStep
from sglang_loader.load_plan.trace import Space, TensorRef, leaves, map_leaves

MAX_BOUND_SOURCES = 4


Slots: TypeAlias = dict[int, torch.Tensor]
"""The temporaries of a replay, by number: the whole storage of each, flat."""


@dataclass(frozen=True, slots=True)
class _Binding:
    """Concrete views for one bucket: the copies, then the tape."""

    copies: tuple[Callable[[], object], ...]
    tape: tuple[Callable[[Slots], None], ...]


class PlanExecutor:
    """Executes the buckets of one plan. Whether the plan still holds is for `guard` to say."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._bound: dict[int, OrderedDict[object, _Binding]] = defaultdict(OrderedDict)

    def replay(self, bucket_index: int, source: BucketSource) -> None:
        """Load bucket `bucket_index` from `source`, asynchronously on the current stream.

        Args:
            source: the bucket, on any device that copies reach.

        Raises:
            IndexError: there is no such bucket.
            ValueError: the source does not hold every tensor of the bucket, or is smaller than the
                arranged buffer that the plan reads.
            RuntimeError: a step of the tape made a temporary of another size than when it was
                traced.
        """
        plan = self._plan.buckets[bucket_index]
        bound = self._bound[bucket_index]
        binding = bound.get(source.key)
        if binding is None:
            _check_source(plan, source)
            while len(bound) >= MAX_BOUND_SOURCES:
                bound.popitem(last=False)
            binding = bound[source.key] = _bind(plan, self._plan.destinations, source)
        _run(binding)

    def unbind(self) -> None:
        """Forget all bindings, and with them the last references to the sources."""
        self._bound.clear()


def replay_once(plan: BucketPlan, destinations: Destinations, buffer: torch.Tensor) -> None:
    """`PlanExecutor.replay` for one bucket's plan without keeping the binding: for checks and
    tests.
    """
    source = BucketSource.flat(buffer)
    _check_source(plan, source)
    _run(_bind(plan, destinations, source))


def _check_source(plan: BucketPlan, source: BucketSource) -> None:
    if plan.source_nbytes is None:
        source.check(plan.layout)
    elif plan.copies or plan.tape:  # else nothing may have come
        source.check_range(0, plan.source_nbytes)


def _run(binding: _Binding) -> None:
    slots: Slots = {}
    with torch.no_grad():
        for copy in binding.copies:
            copy()
        for step in binding.tape:
            step(slots)


def _bind(plan: BucketPlan, destinations: Destinations, source: BucketSource) -> _Binding:
    grouped = _Grouped()
    # Views of a tensor that a step changes must stay views of the same memory.
    refs = (ref for step in plan.tape for ref in step.refs(Space.BUCKET))
    joined = merge(ref.region.bounds() for ref in refs) if plan.changes_buffer else []
    gathered = _Gathered(source, grouped, joined)

    def resolve(value: Any) -> Any:
        """Everything but temporaries is a tensor from now on."""
        if not isinstance(value, TensorRef) or value.space is Space.SLOT:
            return value
        if value.space is Space.BUCKET:
            memory, shift = gathered.locate(*value.region.bounds())
            return view_of(memory, replace(value, region=replace(value.region, offset=shift)))
        is_constant = value.space is Space.CONSTANT
        return view_of((plan.constants if is_constant else destinations.memory)[value.index], value)

    with torch.inference_mode(False), torch.no_grad():
        for copy in plan.copies:
            for part, memory in source.copies(copy):
                grouped.add(part, memory, destinations.memory[copy.storage])
        tape = tuple(
            partial(_run_step, step, plan, *map_leaves(resolve, (step.args, step.kwargs)))
            for step in plan.tape
        )
        copies = grouped.bound()
    return _Binding(copies, tape)


class _Grouped:
    """Copies, those that are made at once together."""

    def __init__(self) -> None:
        self._groups: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def add(self, copy: StridedCopy, memory: torch.Tensor, base: torch.Tensor) -> None:
        """A copy from `memory` to `base`."""
        target, origin = copy_views(copy, memory, base)
        # torch's fused kernel takes a group only if all of it is dense.
        words = target.dtype == origin.dtype == WORD and is_available(target.device)
        is_dense = None if words else not copy.dims
        key = (target.dtype, origin.dtype, is_dense, target.device, origin.device)
        targets, origins = self._groups.setdefault(key, ([], []))
        targets.append(target)
        origins.append(origin)

    def bound(self) -> tuple[Callable[[], object], ...]:
        """What makes them all."""
        return tuple(_bind_copies(*group) for group in self._groups.values())


class _Gathered:
    """What operators of a tape read from a source; what lies in several places is copied together.

    Args:
        grouped: gets the copies, which must be made before the tape runs.
        ranges: of the bucket, disjoint: what lies in one of them is located with all of it.
    """

    def __init__(self, source: BucketSource, grouped: _Grouped, ranges: Sequence[Interval]) -> None:
        self._source = source
        self._grouped = grouped
        self._ranges = ranges
        self._joined: dict[tuple[int, int], torch.Tensor] = {}

    def locate(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        """The memory that holds bytes [start, stop) of the bucket, and where in it they begin."""
        whole = next((r for r in self._ranges if r[0] <= start and stop <= r[1]), (start, stop))
        memory, at = self._located(*whole)
        return memory, at + start - whole[0]

    def _located(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        if (joined := self._joined.get((start, stop))) is not None:
            return joined, 0
        parts = list(self._source.copies(StridedCopy(0, start, 0, (), stop - start)))
        copy, memory = parts[0]
        if len(parts) == 1 and not copy.dims:
            return memory, copy.src
        buffer = torch.empty(stop - start, dtype=torch.uint8, device=memory.device)
        for part, memory in parts:
            self._grouped.add(part, memory, buffer)
        self._joined[start, stop] = buffer
        return buffer, 0


def _bind_copies(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Callable[[], object]:
    """What makes all copies of a group: our kernel where it takes them, else torch's."""
    devices = {targets[0].device, sources[0].device}
    is_words = targets[0].dtype == sources[0].dtype == WORD
    if is_words and len(devices) == 1 and is_available(targets[0].device):
        return BatchedCopy(targets, sources, peer_of).run
    return partial(torch._foreach_copy_, targets, sources)


def view_of(base: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """The tensor that `ref` describes, over the storage of `base` (offsets count from `base`'s
    first byte).
    """
    start = int(base.storage_offset()) * base.element_size() + ref.region.offset
    view = torch.empty(0, dtype=ref.dtype, device=base.device)
    offset = start // ref.region.itemsize
    return view.set_(base.untyped_storage(), offset, ref.region.shape, ref.region.stride)


def _run_step(
    step: TapeStep, plan: BucketPlan, args: tuple[Any, ...], kwargs: dict[str, Any], slots: Slots
) -> None:
    """Run one operator of the tape; its results that are temporaries go to `slots`.

    Args:
        args: of the operator; only temporaries are still `TensorRef`s. Likewise `kwargs`.
    """

    def fill(value: Any) -> Any:
        return view_of(slots[value.index], value) if isinstance(value, TensorRef) else value

    args, kwargs = map_leaves(fill, (args, kwargs))
    for slot, leaf in zip(step.outputs, leaves(step.op(*args, **kwargs)), strict=True):
        if slot is None:
            continue
        raw = leaf.untyped_storage()
        expected = plan.slot_nbytes[slot]
        if raw.nbytes() != expected:
            raise RuntimeError(f"{step.op} made {raw.nbytes()} bytes, {expected} when traced")
        slots[slot] = torch.empty(0, dtype=torch.uint8, device=leaf.device).set_(raw)
    for slot in step.releases:
        slots.pop(slot, None)
