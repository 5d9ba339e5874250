"""Builds a load plan while a sync runs eagerly, bucket by bucket.

    builder = PlanBuilder(model, model.load_weights, context={"tp_rank": 0})
    for layout, buffer in sync:
        builder.add_bucket(layout, buffer)          # loads it eagerly; the weights are right
        whatever happens
    plan = builder.finish()

The bucket is loaded twice: loaders of the `bind_or_assign` kind bind new memory on their first call
and copy into it on later ones, and only what the later ones do can be replayed.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from sglang_loader.common.geometry import Region, region_runs
from sglang_loader.common.intervals import (
    Interval,
    contains,
    intersects,
    merge,
    merge_runs,
    subtract,
)
from sglang_loader.common.layout import BucketLayout
from sglang_loader.load_plan.compiler import compile_bucket
from sglang_loader.load_plan.destinations import (
    Destinations,
    TensorEntry,
    collect_destinations,
    first_difference,
)
from sglang_loader.load_plan.guard import Fingerprint
from sglang_loader.load_plan.plan import BucketPlan, LoadPlan, LoadWeights, PlanRefused
from sglang_loader.load_plan.trace import Trace
from sglang_loader.load_plan.tracer import record


class PlanBuilder:
    """Traces one sync and compiles it.

    Args:
        model: whose modules hold all destinations.
        load_weights: the model's own loader, called twice for each bucket.
        context: what else the plan depends on (TP and EP rank, expert map, quantisation method), as
            plain values.
    """

    def __init__(
        self, model: nn.Module, load_weights: LoadWeights, context: Mapping[str, object]
    ) -> None:
        self._model = model
        self._load_weights = load_weights
        self._context = dict(context)
        self._buckets: list[BucketPlan] = []
        self._destinations: Destinations | None = None

    def add_bucket(self, layout: BucketLayout, buffer: torch.Tensor) -> BucketPlan:
        """Load one bucket eagerly and compile its plan. Takes a scratch copy of the bucket.

        Raises:
            PlanRefused: no plan for this bucket, hence none for the sync. The bucket is loaded all
                the same.
            ValueError: the buffer does not fit the layout.
        """
        # Loaders may change their sources in place: each load gets a fresh copy.
        scratch = buffer[: layout.nbytes].clone()
        self._load_weights(iter(layout.views(scratch)))
        scratch.copy_(buffer[: layout.nbytes])
        # What this first load bound is new to the plan; what it moved ends the plan.
        before = self._collect()
        if self._destinations is not None:
            _refuse_if(first_difference(self._destinations, before, new_allowed=True))
        with _collector_paused():
            trace = self._trace(layout, scratch, before)
            _refuse_if(first_difference(before, self._collect()))
            self._destinations = before
            self._buckets.append(compile_bucket(layout, trace))
        return self._buckets[-1]

    @property
    def destinations(self) -> Destinations:
        """The model's storages as the last added bucket found them.

        Raises:
            ValueError: no bucket was added.
        """
        if self._destinations is None:
            raise ValueError("a plan needs at least one bucket, none was added")
        return self._destinations

    def finish(self) -> LoadPlan:
        """The plan for the whole sync, once all buckets were added.

        Raises:
            PlanRefused: Python reads the data of a tensor that the sync writes.
            ValueError: no bucket was added.
        """
        layouts = [bucket.layout for bucket in self._buckets]
        fingerprint = Fingerprint.of(layouts, self._context)
        return assemble(self._buckets, self.destinations, fingerprint)

    def _trace(self, layout: BucketLayout, scratch: torch.Tensor, before: Destinations) -> Trace:
        try:
            return record(lambda: self._load_weights(iter(layout.views(scratch))), scratch, before)
        except Exception as error:
            raise PlanRefused(f"load_weights failed under tracing: {error!r}") from error

    def _collect(self) -> Destinations:
        try:
            found = collect_destinations(self._model, self._destinations)
        except ValueError as error:
            raise PlanRefused(str(error)) from error
        if found.opaque:
            raise PlanRefused(f"{found.opaque[0]} is not a plain strided tensor")
        return found


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Tracing makes a million small objects and no cycles: collections would take a third of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def assemble(
    buckets: Sequence[BucketPlan], destinations: Destinations, fingerprint: Fingerprint
) -> LoadPlan:
    """Put bucket plans together and work out what the whole sync covers.

    Raises:
        PlanRefused: Python reads the data of a tensor that the sync writes.
    """
    written = _merge_all(bucket.written for bucket in buckets)
    for bucket in buckets:
        for what, storage, interval in bucket.host_reads:
            if intersects(written.get(storage, []), interval):
                name = destinations.storages[storage].name
                raise PlanRefused(
                    f"Python reads the data of {name} ({what}), which the sync writes"
                )
    coverage = _coverage(buckets, written)
    uncovered = [
        tensor
        for tensor in destinations.tensors
        if not _covers(coverage.get(tensor.storage, []), tensor)
    ]
    return LoadPlan(
        buckets=tuple(buckets),
        fingerprint=fingerprint,
        coverage={destinations.storages[i].name: tuple(coverage[i]) for i in sorted(coverage)},
        uncovered=tuple(t.name for t in uncovered),
        uncovered_parameters=tuple(t.name for t in uncovered if t.kind == "parameter"),
        ignored=tuple(name for bucket in buckets for name in bucket.ignored),
        destinations=destinations,
    )


def _coverage(
    buckets: Sequence[BucketPlan], written: Mapping[int, list[Interval]]
) -> dict[int, list[Interval]]:
    """`written` without the bytes that a tape reads before this sync has written them."""
    so_far: dict[int, list[Interval]] = {}
    exposed: dict[int, list[Interval]] = defaultdict(list)
    for bucket in buckets:
        for storage, ranges in bucket.live_in.items():
            exposed[storage] += subtract(ranges, so_far.get(storage, []))
        so_far = _merge_all([so_far, bucket.written])
    left = {storage: subtract(ranges, exposed[storage]) for storage, ranges in written.items()}
    return {storage: ranges for storage, ranges in left.items() if ranges}


def _merge_all(parts: Iterable[Mapping[int, Sequence[Interval]]]) -> dict[int, list[Interval]]:
    collected: dict[int, list[Interval]] = defaultdict(list)
    for part in parts:
        for storage, ranges in part.items():
            collected[storage].extend(ranges)
    return {storage: merge(ranges) for storage, ranges in collected.items()}


def _covers(ranges: Sequence[Interval], tensor: TensorEntry) -> bool:
    region = Region(tensor.offset, tensor.shape, tensor.stride, tensor.dtype.itemsize)
    if contains(ranges, region.bounds()):
        return True
    return all(contains(ranges, run) for run in merge_runs([region_runs(region)]))


def _refuse_if(difference: str | None) -> None:
    if difference is not None:
        raise PlanRefused(f"load_weights rebinds tensors: {difference}")
