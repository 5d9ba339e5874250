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
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.copies import copy_views
from sglang_loader.common.copy_kernel import WORD, BatchedCopy, is_available, mixed
from sglang_loader.common.regions.geometry import StridedCopy
from sglang_loader.common.regions.intervals import Interval, merge
from sglang_loader.common.shared_memory import peer_of
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.plan import BucketPlan, LoadPlan, TapeStep
from sglang_loader.load_plan.trace import Space, TensorRef, leaves, map_leaves

MAX_BOUND_SOURCES = 4


Slots: TypeAlias = dict[int, torch.Tensor]
"""The temporaries of a replay, by number: the whole storage of each, flat."""


Binding: TypeAlias = tuple[list[Callable[[], object]], list[Callable[[Slots], None]]]
"""Concrete views for one bucket: the copies, then the tape."""


class PlanExecutor:
    """Executes the buckets of one plan. Whether the plan still holds is for `guard` to say."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._bound: dict[object, OrderedDict[object, Binding]] = defaultdict(OrderedDict)

    def replay(self, index: int, source: BucketSource, *, arranged: bool = False) -> None:
        """Load a bucket from `source`, on any device that copies reach, asynchronously on the
        current stream. `arranged`: the source has what the plan reads of it alone.

        Raises:
            IndexError: there is no such bucket.
            ValueError: the source does not hold every tensor of the bucket, or is smaller than the
                arranged buffer that the plan reads.
            RuntimeError: a step of the tape made a temporary of another size than when it was
                traced.
        """
        plan = self._plan.buckets[index]
        if arranged:
            found = self._plan.arranged[index]
            assert found is not None, "see arranged_nbytes"
            _, plan = found
        bound = self._bound[index, arranged]
        binding = bound.get(source.key)
        if binding is None:
            while len(bound) >= MAX_BOUND_SOURCES:
                bound.popitem(last=False)
            binding = bound[source.key] = _bind(plan, self._plan.destinations, source)
        _run(binding)

    def unbind(self) -> None:
        """Forget all bindings, and with them the last references to the sources."""
        self._bound.clear()


def replay_once(plan: BucketPlan, destinations: Destinations, buffer: torch.Tensor) -> None:
    """`PlanExecutor.replay` of one bucket's plan; the binding is not kept."""
    _run(_bind(plan, destinations, BucketSource.flat(buffer)))


def _run(binding: Binding) -> None:
    slots: Slots = {}
    copies, tape = binding
    with torch.no_grad():
        for copy in copies:
            copy()
        for step in tape:
            step(slots)


def _bind(plan: BucketPlan, destinations: Destinations, source: BucketSource) -> Binding:
    if plan.source_nbytes is None:
        source.check(plan.layout)
    elif plan.copies or plan.tape:  # else nothing may have come
        source.check_range(0, plan.source_nbytes)
    # Views of a tensor that a step changes must stay views of the same memory.
    refs = (ref for step in plan.tape for ref in step.refs(Space.BUCKET))
    joined = merge(ref.region.bounds() for ref in refs) if plan.changes_buffer else []
    bound = _BoundSource(source, joined)

    def resolve(value: Any) -> Any:
        """Everything but temporaries is a tensor from now on."""
        if not isinstance(value, TensorRef) or value.space is Space.SLOT:
            return value
        if value.space is Space.BUCKET:
            memory, shift = bound.locate(*value.region.bounds())
            return view_of(memory, replace(value, region=replace(value.region, offset=shift)))
        is_constant = value.space is Space.CONSTANT
        return view_of((plan.constants if is_constant else destinations.memory)[value.index], value)

    with torch.inference_mode(False), torch.no_grad():
        for copy in plan.copies:
            bound.add(copy, destinations.memory[copy.storage])
        tape: list[Callable[[Slots], None]] = [
            partial(_run_step, step, plan, *map_leaves(resolve, (step.args, step.kwargs)))
            for step in plan.tape
        ]
        return bound.copies(), tape


class _BoundSource:
    """Copies out of a source, grouped by how they are made; also of what operators of a tape read
    and lies in several places, which is copied together before the tape runs. What lies in one of
    the disjoint ranges `joined` of the bucket is located with all of it.
    """

    def __init__(self, source: BucketSource, joined: Sequence[Interval]) -> None:
        self._source = source
        self._joined = joined
        self._groups: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._gathered: dict[Interval, torch.Tensor] = {}

    def add(self, copy: StridedCopy, base: torch.Tensor) -> None:
        """A copy out of the bucket to `base`."""
        for part, memory in self._source.copies(copy):
            target, origin = copy_views(part, memory, base)
            # torch's fused kernel takes a group only if all of it is dense.
            words = target.dtype == origin.dtype == WORD and is_available(target.device)
            is_dense = None if words else not part.dims
            key = (target.dtype, origin.dtype, is_dense, target.device, origin.device)
            targets, origins = self._groups.setdefault(key, ([], []))
            targets.append(target)
            origins.append(origin)

    def copies(self) -> list[Callable[[], object]]:
        """What makes them all."""
        return [_bind_copies(*group) for group in self._groups.values()]

    def locate(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        """The memory that holds bytes [start, stop) of the bucket, and where in it they begin."""
        whole = next((r for r in self._joined if r[0] <= start and stop <= r[1]), (start, stop))
        memory, at = self._located(*whole)
        return memory, at + start - whole[0]

    def _located(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        if (gathered := self._gathered.get((start, stop))) is not None:
            return gathered, 0
        whole = StridedCopy(0, start, 0, (), stop - start)
        (copy, memory), *others = self._source.copies(whole)
        if not others and not copy.dims:
            return memory, copy.src
        buffer = torch.empty(stop - start, dtype=torch.uint8, device=memory.device)
        self.add(whole, buffer)
        self._gathered[start, stop] = buffer
        return buffer, 0


def _bind_copies(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Callable[[], object]:
    """What makes all copies of a group: our kernel where it takes them, else torch's. Either reads
    from all GPUs on which sources lie at the same time, see `copy_kernel`.
    """
    devices = {targets[0].device, sources[0].device}
    is_words = targets[0].dtype == sources[0].dtype == WORD
    _, gpus = np.unique([peer_of(source) or "" for source in sources], return_inverse=True)
    if is_words and len(devices) == 1 and is_available(targets[0].device):
        return BatchedCopy(targets, sources, gpus).run
    order = mixed(gpus)
    return partial(torch._foreach_copy_, [targets[i] for i in order], [sources[i] for i in order])


def view_of(base: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """The tensor that `ref` describes; its offset counts from `base`'s first byte."""
    start = int(base.storage_offset()) * base.element_size() + ref.region.offset
    view = torch.empty(0, dtype=ref.dtype, device=base.device)
    offset = start // ref.region.itemsize
    return view.set_(base.untyped_storage(), offset, ref.region.shape, ref.region.stride)


def _run_step(
    step: TapeStep, plan: BucketPlan, args: tuple[Any, ...], kwargs: dict[str, Any], slots: Slots
) -> None:
    """Run one operator of the tape, of whose arguments only temporaries are still `TensorRef`s; its
    results that are temporaries go to `slots`.
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
