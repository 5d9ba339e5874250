"""Route "send": every trainer rank sends every engine rank the part of its shards that it reads.

For engines on other devices (disaggregated), instead of a broadcast of all weights by the first
trainer rank. Each byte that an engine rank reads is sent once, by a trainer rank that holds it
(`exchange_plan.plan_reader` checks that). In the proof that rank compares it with the full export,
found as the engine rank would find it. See `shard_route`; all trainer ranks and engine ranks are
one process group (`engine.update_groups`), and no rank packs more than a bucket at a time.

The engine ranks unpack nothing: their load plans read from the receive buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang_loader.common.copies import gather_reads
from verl_sglang_sync.engine.engine_ranks import EngineRank
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.route import Delivery, InStep, ReadyBucket, RouteContext, SyncSource
from verl_sglang_sync.routes.send.delivery import SendDelivery
from verl_sglang_sync.routes.shards.exchange_plan import Received, received
from verl_sglang_sync.routes.shards.shard_route import (
    ShardPlan,
    ShardRoute,
    first_problem,
)
from verl_sglang_sync.sources.bucket_stream import Batch


class Send(ShardRoute):
    """Route "send"; `process_group` returns that of all trainer and engine ranks in a sync."""

    not_taken = "the first trainer rank gathers all weights and broadcasts them to all engines"

    def __init__(self, context: RouteContext, process_group: Callable[[], Any]) -> None:
        super().__init__(context, context.settings.bucket_bytes)
        self._process_group = process_group
        self._limit_s = context.settings.request_timeout_s
        self._found: list[list[Received]] = []
        self._pair_bytes: list[list[int]] = []

    def _prepare(self, plan: ShardPlan) -> None:
        if plan.own_arrangements:
            first = plan.first_reader
            self._found = plan.received_by(range(first, first + len(plan.all_arrangements)))
            self._pair_bytes = pair_bytes(self._found, first)

    def _compare(self, plan: ShardPlan, batches: Iterator[Batch]) -> str | None:
        return first_problem(plan.buckets, batches, partial(_difference, plan, self._device))

    def _source_of(self, plan: ShardPlan, report: SyncReport) -> SyncSource:
        return SentBuckets(self, plan, report)


@dataclass(eq=False)
class SentBuckets(SyncSource):
    """The buckets of one sync, sent by all trainer ranks to engines that hold the arrangements of
    the plan, whose all-to-all has begun.
    """

    _route: Send
    _plan: ShardPlan
    _report: SyncReport

    def __post_init__(self) -> None:
        self.required_arrangements = [each.digest for each in self._plan.own_arrangements]

    def delivery(self, engines: Sequence[EngineRank], in_step: InStep) -> Delivery:
        route, plan, report = self._route, self._plan, self._report
        group = route._process_group()
        return SendDelivery(
            plan, route._found, engines, group, route._device, route._limit_s, in_step, report
        )

    def __iter__(self) -> Iterator[ReadyBucket]:
        for index, bucket in enumerate(self._plan.buckets):
            self._report.count_bucket(len(bucket.layout.tensors), bucket.payload_bytes)
            self._report.num_sent += 1
            yield ReadyBucket(index, bucket)

    def end(self) -> None:
        self._report.pair_bytes = pairs = self._route._pair_bytes
        self._report.sent_bytes = sum(map(sum, pairs))


def pair_bytes(found: Sequence[Sequence[Received]], num_trainers: int) -> list[list[int]]:
    """Bytes that each trainer rank sends each engine rank, by trainer rank and engine rank."""
    return [
        [sum(each.payloads[trainer] for each in buckets) for buckets in zip(*found, strict=True)]
        for trainer in range(num_trainers)
    ]


def _difference(
    plan: ShardPlan, device: torch.device, index: int, tensors: Sequence[torch.Tensor] | None
) -> str | None:
    """Pack a bucket, and compare the bytes for each engine rank with the exported tensors."""
    if tensors is None:
        return None
    numbers, first = plan.all_to_all.numbers_of(index), plan.first_reader
    for rank, arrangement in enumerate(plan.reads[index][first:], first):
        whole = gather_reads(arrangement, tensors, device)
        found = received([plan.sends[index][rank]], len(numbers), joins=False)
        start = 0  # of the bytes of one all-to-all; no piece is in two of them
        for number in numbers:  # packed for each engine rank anew: the scratch holds two of them
            packed, sizes = plan.all_to_all.pack(number)
            part = packed.split(list(sizes))[rank]
            stop = start + part.numel()
            for piece in found.pieces:
                if start <= piece.offset < stop:
                    expected = whole[piece.start : piece.start + piece.nbytes]
                    arrived = part[piece.offset - start :][: piece.nbytes]
                    if not torch.equal(expected, arrived):
                        return f"bucket {index}, byte {piece.start}, differs from the full export"
            start = stop
        if start != found.nbytes:
            return f"bucket {index} is sent in {start} bytes, {found.sizes} are received"
    return None
