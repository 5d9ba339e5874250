"""Route "exchange": trainer ranks send each other the parts of their shards that engines read.

See `shard_route`. Each rank receives the part that its own engine reads into staging buffers, which
the engine maps (`exchange_plan.received`). Buckets are collectives of torch's default group, so a
rank that has failed still takes part in those of all other buckets.
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
"""A rank sends this part of a bucket at a time, so that scratch for two is half a bucket."""


class Exchange(ShardRoute):
    """Route "exchange", in torch's default group."""

    fallback_text = "every rank exports all weights in full, nothing is exchanged"

    def __init__(self, context: RouteContext, ring: StagingRing) -> None:
        super().__init__(context, context.settings.bucket_bytes // PIECES_PER_BUCKET)
        self._ring = ring

    def can_learn(self, weights: Iterable[NamedTensor]) -> bool:
        return super().can_learn(weights) and world_size() > 1

    def _reserve(self, plan: ShardPlan) -> None:
        self._ring.prepare([found.nbytes for (found,) in plan.received])

    def _source_of(self, plan: ShardPlan, report: SyncReport) -> ShardBuckets:
        return ExchangedBuckets(plan, report, self._ring)


class ExchangedBuckets(ShardBuckets):
    """Buckets that are received in order from all ranks into the staging buffers; each is
    collective.
    """

    def __init__(self, plan: ShardPlan, report: SyncReport, ring: StagingRing) -> None:
        super().__init__(plan, report)
        self._all_to_all = plan.all_to_all
        self._found = [found for (found,) in plan.received]
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
        """Receive the next bucket; returns its storage.

        Raises:
            Exception: the first error; this rank takes part in all collectives of the bucket before
                it is raised.
        """
        index, self._num_received = self._num_received, self._num_received + 1
        buffer, sizes = self._ring.buffer(index), self._found[index].sizes
        errors: list[Exception] = []
        travelling: deque[Any] = deque()
        # With two collectives in a group at a time torch 2.11's gloo has crashed.
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
        """Take part in the remaining collectives, if they have begun, whatever happens: the other
        ranks wait for what this one sends.
        """
        while 0 < self._num_received < len(self._found):
            try:
                self.receive()
            except Exception:
                text = "this rank's part of a bucket could not be sent: other ranks may wait for it"
                logger.warning(text, exc_info=True)
