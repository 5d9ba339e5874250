"""Builds the load plan of a sync out of its traced buckets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from sglang_loader.common.regions.intervals import Interval, intersects, merge, subtract
from sglang_loader.load_plan.compiler import compile_bucket
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.guard import Fingerprint
from sglang_loader.load_plan.plan import BucketPlan, LoadPlan, PlanRefused
from sglang_loader.load_plan.trace import TracedBucket


class PlanBuilder:
    """Compiles the traced buckets of one sync.

    Args:
        context: what else the plan depends on (TP and EP rank, expert map, quantisation method), as
            plain values.
    """

    def __init__(self, context: Mapping[str, object]) -> None:
        self._context = dict(context)
        self._buckets: list[BucketPlan] = []
        self._destinations: Destinations | None = None

    def add_bucket(self, traced: TracedBucket) -> BucketPlan:
        """Compile the next bucket's plan.

        Raises:
            PlanRefused: no plan for this bucket, hence none for the sync.
        """
        self._buckets.append(compile_bucket(traced))
        self._destinations = traced.destinations
        return self._buckets[-1]

    def finish(self) -> LoadPlan:
        """The plan for the whole sync, once all buckets were added, and what the sync covers.

        Raises:
            PlanRefused: Python reads the data of a tensor that the sync writes.
            ValueError: no bucket was added.
        """
        if self._destinations is None:
            raise ValueError("a plan needs at least one bucket, none was added")
        storages = self._destinations.storages
        written = _merge_all(bucket.written for bucket in self._buckets)
        for what, storage, interval in (read for b in self._buckets for read in b.host_reads):
            if intersects(written.get(storage, []), interval):
                name = storages[storage].name
                raise PlanRefused(
                    f"Python reads the data of {name} ({what}), which the sync writes"
                )
        exposed = _read_before_written(self._buckets)
        left = {i: subtract(written[i], exposed.get(i, ())) for i in sorted(written)}
        return LoadPlan(
            buckets=tuple(self._buckets),
            fingerprint=Fingerprint.of([b.layout for b in self._buckets], self._context),
            coverage={storages[i].name: tuple(ranges) for i, ranges in left.items() if ranges},
            destinations=self._destinations,
        )


def _read_before_written(buckets: Sequence[BucketPlan]) -> Mapping[int, Sequence[Interval]]:
    """Bytes that a tape reads before this sync has written them, by storage."""
    so_far: dict[int, list[Interval]] = {}
    exposed: dict[int, list[Interval]] = defaultdict(list)
    for bucket in buckets:
        for storage, ranges in bucket.live_in.items():
            exposed[storage] += subtract(ranges, so_far.get(storage, []))
        so_far = _merge_all([so_far, bucket.written])
    return exposed


def _merge_all(parts: Iterable[Mapping[int, Sequence[Interval]]]) -> dict[int, list[Interval]]:
    collected: dict[int, list[Interval]] = defaultdict(list)
    for part in parts:
        for storage, ranges in part.items():
            collected[storage].extend(ranges)
    return {storage: merge(ranges) for storage, ranges in collected.items()}
