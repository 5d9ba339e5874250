"""Route "exchange": trainer ranks send each other the parts of their shards that engines read.

`shard_route` describes the plan. Each rank receives the bytes that its own engine reads into
staging buffers, which the engine maps. `exchange_plan.received` locates the bucket in a buffer.

Each bucket takes collectives of torch's default group. A rank that has failed therefore still takes
part in the collectives of all remaining buckets.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from sglang_loader.common.regions.arrangement import arranged_nbytes
from verl_sglang_sync.ranks import own_rank, world_size
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.route import ReadyBucket, RouteContext
from verl_sglang_sync.routes.shards.all_to_all import NUM_TRAVELLING
from verl_sglang_sync.routes.shards.shard_route import ShardBuckets, ShardPlan, ShardRoute
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.sources.export import NamedTensor

logger = logging.getLogger(__name__)

PIECES_PER_BUCKET = 4
"""The number of pieces of a bucket. The scratch for two pieces is half a bucket."""


class Exchange(ShardRoute):
    """Route "exchange", in torch's default group."""

    fallback_text = "every rank exports all weights in full, nothing is exchanged"

    def __init__(self, context: RouteContext, ring: StagingRing) -> None:
        super().__init__(context, context.settings.bucket_bytes // PIECES_PER_BUCKET)
        self._ring = ring

    def can_learn(self, weights: Iterable[NamedTensor]) -> bool:
        return super().can_learn(weights) and world_size() > 1

    def _reserve(self, plan: ShardPlan) -> None:
        self._ring.prepare([bucket.nbytes for (bucket,) in plan.received])

    def _source_of(self, plan: ShardPlan, report: SyncReport) -> ShardBuckets:
        return ExchangedBuckets(plan, report, self._ring)


class ExchangedBuckets(ShardBuckets):
    """The buckets of one sync, received in order from all ranks into staging buffers.

    Each bucket is collective.
    """

    def __init__(self, plan: ShardPlan, report: SyncReport, ring: StagingRing) -> None:
        super().__init__(plan, report)
        self._all_to_all = plan.all_to_all
        self._sizes = [bucket.sizes for (bucket,) in plan.received]
        self._ring = ring
        self._num_received = 0

    def __iter__(self) -> Iterator[ReadyBucket]:
        report, plan = self.report, self.plan
        for index, bucket in enumerate(plan.buckets):
            with report.stage("gather"):
                storage = self.receive()
            held = self._ring.nbytes + self._all_to_all.nbytes
            report.staging_bytes = max(report.staging_bytes, held)
            yield ReadyBucket(
                index,
                bucket,
                storage=storage,
                pieces=partial(plan.pieces_in, index, 0),
                arranged=plan.arrangements[0].is_arranged(index),
                nbytes=arranged_nbytes(plan.reads[index][own_rank()]),
            )

    def end(self) -> None:
        self.report.num_exchanged += len(self.plan.buckets)

    def receive(self) -> torch.UntypedStorage:
        """Receive the next bucket, and return the storage of its staging buffer.

        Raises:
            Exception: the first error. This rank takes part in all collectives of the bucket before
                it raises the error.
        """
        index, self._num_received = self._num_received, self._num_received + 1
        buffer, sizes = self._ring.buffer(index), self._sizes[index]
        errors: list[Exception] = []
        travelling: deque[Any] = deque()
        # The gloo backend of torch 2.11 has crashed with two collectives in a group at a time.
        num_ahead = NUM_TRAVELLING if buffer.is_cuda else 1
        stop = 0
        for number, of_ranks in zip(self._all_to_all.numbers_of(index), sizes, strict=True):
            start, stop = stop, stop + sum(of_ranks)
            try:
                if len(travelling) == num_ahead:
                    travelling.popleft().wait()
                self._all_to_all.pack(number)
            except Exception as error:
                errors.append(error)
            try:
                travelling.append(self._all_to_all.launch(number, buffer[start:stop], of_ranks))
            except Exception as error:
                errors.append(error)
        for work in travelling:
            work.wait()
        if errors:
            raise errors[0]
        return self._ring.written(index)

    def drain(self) -> None:
        """Take part in the remaining collectives if the first bucket has begun. Log any error."""
        # The other ranks wait for the bytes of this rank.
        while 0 < self._num_received < len(self._sizes):
            try:
                self.receive()
            except Exception:
                text = "this rank could not send its part of a bucket, so other ranks may hang"
                logger.warning(text, exc_info=True)
