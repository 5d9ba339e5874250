"""Route "exchange": the ranks fill their engines' staging buffers from each other's shards.

See `shard_route`; the readers are the ranks' own engines, and the group is torch's default one, in
which each bucket is collective: whoever fails drains the buckets that are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch

from verl_sglang_sync.collective import own_rank, world_size
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.exchange.proof import exchanged_difference, first_problem
from verl_sglang_sync.routes.exchange.shard_route import ShardPlan, ShardRoute
from verl_sglang_sync.routes.route import ReadyBucket, RouteContext, SyncSource
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.sources.bucket_stream import Batch
from verl_sglang_sync.sources.export import NamedTensor

PIECES_PER_BUCKET = 4
"""A rank sends, and receives, this part of a bucket at a time: the scratch, for two pieces each
way, is no larger than a bucket.
"""


class Exchange(ShardRoute):
    """See `ShardRoute`; torch's default group must be the ranks of the context's group, and the
    scratch is four times `piece_nbytes`.
    """

    not_taken = "every rank exports all weights in full, nothing is exchanged"

    def __init__(
        self,
        context: RouteContext,
        *,
        ring: StagingRing,
        is_wanted: bool,
        piece_nbytes: int,
    ) -> None:
        super().__init__(context, is_wanted=is_wanted, piece_nbytes=piece_nbytes)
        self._ring = ring

    def can_learn(self, weights: Iterable[NamedTensor]) -> bool:
        return super().can_learn(weights) and world_size() > 1

    def _sent(self, plan: ShardPlan, report: SyncReport) -> SyncSource:
        return ExchangedBuckets(plan, self._ring, report)

    def _compare(self, plan: ShardPlan, batches: Iterator[Batch]) -> str | None:
        def compare(index: int, tensors: Sequence[torch.Tensor] | None) -> str | None:
            layout, reads = plan.buckets[index].layout, plan.reads[index][own_rank()]
            return exchanged_difference(
                plan.all_to_all, layout, reads, self._device, index, tensors
            )

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

    def engines_joined(self, held: Sequence[str]) -> None:
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
