"""Route "send": trainer ranks send engine ranks the parts of their shards that the engines read.

This route serves engines on other devices (disaggregated). It replaces a broadcast of all weights
by the first trainer rank. Each byte that an engine rank reads is sent once, by a trainer rank that
holds the byte. `exchange_plan.plan_reader` checks this.

`shard_route` describes the plan. All trainer ranks and engine ranks are one process group
(`engine.update_groups`). No rank packs more than a bucket at a time. The engine ranks unpack
nothing, because their load plans read from the receive buffers.

Before each all-to-all the trainer ranks agree on two facts. Every engine rank receives, and the
all-to-all that last used the same scratch is done. No rank therefore waits in a collective for a
rank that has failed. The next agreement detects a rank that hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import starmap
from typing import Any

import torch

from sglang_loader.common.broadcast.broadcast import Transfer
from verl_sglang_sync.engine.engine_ranks import EngineRank
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.broadcast import GroupDelivery
from verl_sglang_sync.routes.route import Delivery, Poll, ReadyBucket, RouteContext
from verl_sglang_sync.routes.shards.shard_route import ShardBuckets, ShardPlan, ShardRoute


class Send(ShardRoute):
    """Route "send".

    Args:
        process_group: returns the group of all trainer ranks and engine ranks in a sync.
    """

    fallback_text = "the first trainer rank gathers all weights and broadcasts them to all engines"

    def __init__(self, context: RouteContext, process_group: Callable[[], Any]) -> None:
        super().__init__(context, context.settings.bucket_bytes)
        self._process_group = process_group
        self._limit_s = context.settings.request_timeout_s

    def _source_of(self, plan: ShardPlan, report: SyncReport) -> ShardBuckets:
        return SentBuckets(self, plan, report)


class SentBuckets(ShardBuckets):
    """The buckets of one sync, sent by all trainer ranks."""

    def __init__(self, route: Send, plan: ShardPlan, report: SyncReport) -> None:
        super().__init__(plan, report)
        self._route = route

    def __iter__(self) -> Iterator[ReadyBucket]:
        return starmap(ReadyBucket, enumerate(self.plan.buckets))

    def delivery(self, engines: Sequence[EngineRank], poll: Poll) -> Delivery:
        return SendDelivery(self, self._route, engines, poll)

    def end(self) -> None:
        self.report.num_sent += len(self.plan.buckets)
        self.report.pair_bytes = pairs = self.plan.pair_bytes
        self.report.sent_bytes = sum(map(sum, pairs))


class SendDelivery(GroupDelivery):
    """Delivery of one trainer rank's parts of buckets by the all-to-alls of a plan."""

    def __init__(
        self, sent: SentBuckets, route: Send, engines: Sequence[EngineRank], poll: Poll
    ) -> None:
        super().__init__(engines, route._limit_s, poll, sent.report)
        self._plan, self._group = sent.plan, route._process_group()
        self._nothing = torch.empty(0, dtype=torch.uint8, device=route._device)

    def deliver(self, ready: ReadyBucket) -> None:
        """Announce a bucket, and send the bucket as soon as all engine ranks receive."""
        for reader, engine in enumerate(self._engines):
            with engine.naming_errors():
                engine.session.load(
                    ready.index,
                    ready.bucket,
                    self._plan.pieces_in(ready.index, reader, 0),
                    read_only=False,
                    arranged=self._plan.arrangements[reader].is_arranged(ready.index),
                    receives=self._plan.received[ready.index][reader].sizes,
                )
        for number in self._plan.all_to_all.numbers_of(ready.index):
            with self._report.stage("load"):
                self._wait(ready.index + 1)
            with self._report.stage("pack"):
                self._start(number, ready.index)

    def _start(self, number: int, index: int) -> None:
        moves, nothing = self._plan.all_to_all, self._nothing
        try:
            moves.pack(number)
        finally:  # even after a failure, because the other ranks would hang
            none = [0] * len(self._plan.reads[index])
            work = moves.launch(number, nothing, none, self._group)
            self._travelling.append((index, Transfer(work, nothing.device)))
