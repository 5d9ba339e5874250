"""Route "exchange": the ranks fill their engines' staging buffers from each other's shards.

See `shard_route`; the readers are the ranks' own engines, and the group is torch's default one, in
which each bucket is collective: whoever fails drains the buckets that are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.arrangement import Arrangement
from verl_sglang_sync.collective import own_rank, result_or_reason, world_size
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.exchange.shard_route import (
    ShardPlan,
    ShardRoute,
    first_problem,
    gather_arranged,
)
from verl_sglang_sync.routes.route import ReadyBucket, RouteContext, SyncSource
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.sources.bucket_stream import Batch
from verl_sglang_sync.sources.export import NamedTensor

PIECES_PER_BUCKET = 4
"""A rank sends, and receives, this part of a bucket at a time: the scratch, for two pieces each
way, is no larger than a bucket.
"""


class Exchange(ShardRoute):
    """See `ShardRoute`; in torch's default group."""

    not_taken = "every rank exports all weights in full, nothing is exchanged"

    def __init__(self, context: RouteContext, ring: StagingRing) -> None:
        super().__init__(context, context.settings.bucket_bytes // PIECES_PER_BUCKET)
        self._ring = ring

    def can_learn(self, weights: Iterable[NamedTensor]) -> bool:
        return super().can_learn(weights) and world_size() > 1

    def _sent(self, plan: ShardPlan, report: SyncReport) -> SyncSource:
        return ExchangedBuckets(plan, self._ring, report)

    def _compare(self, plan: ShardPlan, batches: Iterator[Batch]) -> str | None:
        compare = partial(_difference, plan, self._device)
        problem = first_problem(plan.buckets, batches, compare)
        plan.all_to_all.drain()
        return problem


class ExchangedBuckets(SyncSource):
    """The buckets of one sync, out of the ranks' shards, once the plan's all-to-all has begun; each
    step is collective. The engines must hold the arrangements that the plan is for.
    """

    def __init__(self, plan: ShardPlan, ring: StagingRing, report: SyncReport) -> None:
        self.needs_arrangements = [known.digest for known in plan.own]
        self._plan = plan
        self._ring = ring
        self._report = report
        self._has_begun = False

    def engines_joined(self) -> None:
        """See `SyncSource`; from here on the ranks wait for each other."""
        self._has_begun = True

    def __iter__(self) -> Iterator[ReadyBucket]:
        report, plan = self._report, self._plan
        sizes = [draft.nbytes for draft in plan.drafts]
        self._ring.prepare(sizes)
        for index, bucket in enumerate(plan.buckets):
            fill = partial(plan.all_to_all.fill, index)
            with report.stage("gather"):
                storage = self._ring.fill(index, sizes[index], fill)
            report.count_bucket(len(bucket.layout.tensors), bucket.payload_bytes)
            report.num_exchanged += 1
            held = self._ring.nbytes + plan.all_to_all.nbytes
            report.staging_bytes = max(report.staging_bytes, held)
            yield ReadyBucket(
                index,
                bucket,
                storage=storage,
                arranged=plan.digest_for(own_rank(), index),
                nbytes=sizes[index],
            )

    def drain(self) -> None:
        if self._has_begun:
            self._plan.all_to_all.drain()


def _difference(
    plan: ShardPlan, device: torch.device, index: int, tensors: Sequence[torch.Tensor] | None
) -> str | None:
    """Exchange a bucket; what differs from its exported tensors, if they came."""
    arrangement = plan.reads[index][own_rank()]
    buffers, reason = None, None
    if tensors is not None:
        given = tensors
        buffers, reason = result_or_reason(
            lambda: (
                gather_arranged(given, arrangement, device),
                torch.zeros(arrangement.nbytes, dtype=torch.uint8, device=device),
            )
        )
    expected, found = buffers or (None, None)
    # Also after a failure: the other ranks wait for this one's shards.
    _, failed = result_or_reason(lambda: plan.all_to_all.fill(index, found))
    if failed is None and expected is not None and found is not None:
        failed = _first_difference(expected, found, arrangement, plan.buckets[index].layout)
    return reason or failed


def _first_difference(
    expected: torch.Tensor, found: torch.Tensor, arrangement: Arrangement, layout: BucketLayout
) -> str | None:
    """The first tensor of which bytes differ, in words; None if none does."""
    if torch.equal(expected, found):
        return None
    at = int((expected != found).nonzero()[0])
    for read in arrangement.reads:
        if read.start <= at < read.start + read.nbytes:
            return f"{layout.tensors[read.tensor].name} differs from the full export"
    return f"byte {at}, which nobody reads, was written"
