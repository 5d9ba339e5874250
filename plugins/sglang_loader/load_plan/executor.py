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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.copies import copy_views
from sglang_loader.common.copy_kernel import WORD, BatchedCopy, is_available
from sglang_loader.common.regions.geometry import StridedCopy
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.plan import BucketPlan, LoadPlan, TapeStep
from sglang_loader.load_plan.trace import Space, TensorRef

MAX_BOUND_SOURCES = 4


@dataclass(frozen=True, slots=True)
class _BoundStep:
    run: Callable[[dict[int, torch.Tensor]], Any]
    step: TapeStep


@dataclass(frozen=True, slots=True)
class _Binding:
    """Concrete views for one bucket: the copies, then the tape."""

    copies: tuple[Callable[[], object], ...]
    tape: tuple[_BoundStep, ...]


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
        _run(binding, plan)

    def unbind(self) -> None:
        """Forget all bindings, and with them the last references to the sources."""
        self._bound.clear()


def replay_once(plan: BucketPlan, destinations: Destinations, buffer: torch.Tensor) -> None:
    """`PlanExecutor.replay` for one bucket's plan without keeping the binding: for checks and
    tests.
    """
    source = BucketSource.flat(buffer)
    _check_source(plan, source)
    _run(_bind(plan, destinations, source), plan)


def _check_source(plan: BucketPlan, source: BucketSource) -> None:
    if plan.source_nbytes is None:
        source.check(plan.layout)
    else:
        source.check_range(0, plan.source_nbytes)


def _run(binding: _Binding, plan: BucketPlan) -> None:
    with torch.no_grad():
        for run in binding.copies:
            run()
        _run_tape(binding.tape, plan.slot_nbytes)


def _bind(plan: BucketPlan, destinations: Destinations, source: BucketSource) -> _Binding:
    with torch.inference_mode(False), torch.no_grad():
        bases = [destinations.bytes_of(i) for i in range(len(destinations.storages))]
        grouped = _Grouped()
        for copy in plan.copies:
            for part, memory in source.copies(copy):
                grouped.add(part, memory, bases[copy.storage])
        gathered = _Gathered(source, grouped)

        def resolve(ref: TensorRef) -> torch.Tensor:
            if ref.space is Space.BUCKET:
                memory, shift = gathered.locate(*ref.region.bounds())
                return view_of(memory, replace(ref, region=replace(ref.region, offset=shift)))
            if ref.space is Space.DESTINATION:
                return view_of(bases[ref.index], ref)
            return view_of(plan.constants[ref.index], ref)

        tape = tuple(_bind_step(step, resolve) for step in plan.tape)
    return _Binding(grouped.bound(), tape)


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
        source: the bucket.
        grouped: gets the copies, which must be made before the tape runs.
    """

    def __init__(self, source: BucketSource, grouped: _Grouped) -> None:
        self._source = source
        self._grouped = grouped
        self._joined: dict[tuple[int, int], torch.Tensor] = {}

    def locate(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        """The memory that holds bytes [start, stop) of the bucket, and where in it they begin."""
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
        return BatchedCopy(targets, sources).run
    return partial(torch._foreach_copy_, targets, sources)


def view_of(base: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """The tensor that `ref` describes, over the storage of `base` (offsets count from `base`'s
    first byte).
    """
    start = int(base.storage_offset()) * base.element_size() + ref.region.offset
    view = torch.empty(0, dtype=ref.dtype, device=base.device)
    offset = start // ref.region.itemsize
    return view.set_(base.untyped_storage(), offset, ref.region.shape, ref.region.stride)


def _bind_step(step: TapeStep, resolve: Callable[[TensorRef], torch.Tensor]) -> _BoundStep:
    """Everything but temporaries is resolved now; those are filled in at each replay."""

    def resolve_now(value: Any) -> Any:
        if isinstance(value, TensorRef) and value.space is not Space.SLOT:
            return resolve(value)
        return value

    args, kwargs = tree_map(resolve_now, (step.args, dict(step.kwargs)))
    uses_slots = any(isinstance(leaf, TensorRef) for leaf in tree_leaves((args, kwargs)))

    def run(slots: dict[int, torch.Tensor]) -> Any:
        if not uses_slots:
            return step.op(*args, **kwargs)

        def fill(value: Any) -> Any:
            return view_of(slots[value.index], value) if isinstance(value, TensorRef) else value

        filled_args, filled_kwargs = tree_map(fill, (args, kwargs))
        return step.op(*filled_args, **filled_kwargs)

    return _BoundStep(run, step)


def _run_tape(tape: tuple[_BoundStep, ...], slot_nbytes: Mapping[int, int]) -> None:
    slots: dict[int, torch.Tensor] = {}
    for bound in tape:
        out = bound.run(slots)
        for slot, leaf in zip(bound.step.outputs, tree_leaves(out), strict=True):
            if slot is None:
                continue
            raw = leaf.untyped_storage()
            if raw.nbytes() != slot_nbytes[slot]:
                raise RuntimeError(
                    f"{bound.step.op} made {raw.nbytes()} bytes, {slot_nbytes[slot]} when traced"
                )
            slots[slot] = torch.empty(0, dtype=torch.uint8, device=leaf.device).set_(raw)
        for slot in bound.step.releases:
            slots.pop(slot, None)
