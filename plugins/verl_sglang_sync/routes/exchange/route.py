"""Route "exchange": the ranks fill their engines' staging buffers from each other's shards.

The export is traced, so that every rank knows which shard holds each byte that an engine rank
reads; each bucket then takes one all-to-all instead of the full export. Every bucket was compared
with the full export, bit for bit, before any is sent so:

    exchange.learn(export, loaded)                  # after a good exported sync
    source = exchange.choose(export, report)        # in the next ones

Each bucket is collective, too; whoever fails drains the buckets that are left.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sglang_loader.common.regions.arrangement import Arrangement
from sglang_loader.common.session.messages import Loaded
from verl_sglang_sync.collective import (
    TrainerGroup,
    common_reason,
    holds_everywhere,
    own_rank,
    result_or_reason,
    world_size,
)
from verl_sglang_sync.engine.arrangements import EngineArrangements, KnownArrangements
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.exchange.all_to_all import AllToAll
from verl_sglang_sync.routes.exchange.exchange_plan import BucketExchange, pieces_of, plan_bucket
from verl_sglang_sync.routes.exchange.proof import compare_with_export
from verl_sglang_sync.routes.route import ReadyBucket, Route, SyncSource
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.sources.bucket_stream import Bucket, BucketStream
from verl_sglang_sync.sources.export import Export, NamedTensor
from verl_sglang_sync.sources.export_trace import NotTraceable, TracedExport
from verl_sglang_sync.sources.known_sources import SourcesChanged, memory_of
from verl_sglang_sync.sources.source_map import SourceMap
from verl_sglang_sync.sources.transfer_plan import whole_bucket

logger = logging.getLogger(__name__)

PIECES_PER_BUCKET = 4
"""A rank sends, and receives, this part of a bucket at a time: the scratch, for two pieces each
way, is no larger than a bucket.
"""


@dataclass(frozen=True)
class ExchangePlan:
    """What this rank sends and receives, and what that was planned for.

    Attributes:
        traced: the export.
        buckets: of it.
        arranged: what this rank's engine had said that it reads.
        arrangements: by bucket, whole where the engine had said nothing.
        exchange: executes it.
    """

    traced: TracedExport
    buckets: list[Bucket]
    arranged: KnownArrangements
    arrangements: list[Arrangement]
    exchange: AllToAll

    def digest_for(self, index: int) -> str:
        """Of the arrangements by which a bucket is packed; "": it is whole."""
        return "" if self.arranged.expected(index) is None else self.arranged.digest


class Exchange(Route):
    """See `Route`.

    Args:
        group: the trainer's ranks; torch's default group must be the same ranks.
        device: of the engine on this rank, and of the shards.
        source_map: of the export.
        stream: its buckets.
        arrangements: what this rank's engine reads of them.
        ring: this rank's staging buffers.
        is_wanted: False: never exchange.
        piece_nbytes: that a rank sends, or receives, at a time; the scratch is four times that.
        recheck_every_n_syncs: compare again in every n-th sync; 0: never.
    """

    not_taken = "every rank exports all weights in full, nothing is exchanged"

    def __init__(
        self,
        group: TrainerGroup,
        device: torch.device,
        source_map: SourceMap,
        stream: BucketStream,
        *,
        arrangements: EngineArrangements,
        ring: StagingRing,
        is_wanted: bool,
        piece_nbytes: int,
        recheck_every_n_syncs: int = 0,
    ) -> None:
        super().__init__(group, is_wanted=is_wanted, recheck_every_n_syncs=recheck_every_n_syncs)
        self._device = device
        self._source_map = source_map
        self._stream = stream
        self._arrangements = arrangements
        self._ring = ring
        self._piece_nbytes = piece_nbytes
        self._plan: ExchangePlan | None = None

    def _source(self, weights: Iterable[NamedTensor], report: SyncReport) -> SyncSource | None:
        with report.stage("confirm"):  # while the engine joins
            if not self._begin(weights):
                return None
        assert self._plan is not None
        return ExchangedBuckets(self._plan, self._ring, report)

    def can_learn(self, weights: Iterable[NamedTensor]) -> bool:
        """See `Route`."""
        return super().can_learn(weights) and world_size() > 1

    def learn(self, weights: Iterable[NamedTensor], loaded: Sequence[Loaded]) -> bool:
        """Trace, plan and compare; see `Route`."""
        arranged = self._arrangements.fitting(self._stream.buckets)
        # An engine that has replayed its plan has said what it reads, unless that is all. What is
        # to be compared again is so on all ranks, also where the engine has loaded this eagerly.
        is_final = bool(arranged.digest) or not any(each.num_eager for each in loaded)
        is_due = self._plan is not None and not self._is_proven
        if not (is_due or holds_everywhere(self._group, is_final)):
            return False
        is_planned = self._plan is not None and self._plan.arranged == arranged
        if not holds_everywhere(self._group, is_planned):
            reason = self._make_plan(weights, arranged)
            if reason is not None:
                return self._conclude(reason)
        elif self._is_proven:
            return False
        if self._begin(weights):
            self._conclude(self._prove(weights))
        return False  # they are exchanged into staging buffers

    def forget(self) -> None:
        """See `Route`; all is planned anew."""
        super().forget()
        self.rest()
        self._plan = None

    def rest(self) -> None:
        """Give the scratch back, and let go of the shards."""
        if self._plan is not None:
            self._plan.exchange.end()

    def _make_plan(self, weights: Iterable[NamedTensor], arranged: KnownArrangements) -> str | None:
        """Find what all ranks' engines read in the ranks' shards; collective.

        Returns:
            Why it is not there, equal on all ranks; None: it is.
        """
        self.forget()
        buckets = self._stream.buckets
        own = [arranged.expected(i) or whole_bucket(b.layout) for i, b in enumerate(buckets)]
        everyones: list[list[Arrangement]] = self._group.all_gather(own)
        if (reason := self._source_map.trace(weights)) is not None:
            return reason
        traced = self._source_map.traced
        drafts, reason = result_or_reason(
            lambda: _of_this_rank(everyones, buckets, traced), NotTraceable
        )
        own_needs = None if drafts is None else [draft.scratch_nbytes for draft in drafts]
        needs = self._group.all_gather(own_needs)
        exchange: AllToAll | None = None
        if drafts is not None and None not in needs:
            largest = [max(of_bucket) for of_bucket in zip(*needs, strict=True)]
            exchange, reason = result_or_reason(partial(self._in_pieces, drafts, largest))
        inputs = everyones, [bucket.digest for bucket in buckets]
        agreed = common_reason(self._group, reason, zlib.crc32(repr(inputs).encode()))
        if agreed is None:
            assert exchange is not None
            self._plan = ExchangePlan(traced, buckets, arranged, own, exchange)
        return agreed

    def _in_pieces(self, drafts: Sequence[BucketExchange], largest: Sequence[int]) -> AllToAll:
        """Cut every bucket, on all ranks alike.

        Args:
            drafts: by bucket, what this rank does.
            largest: by bucket, what any rank sends or receives, in bytes.
        """
        numbers = [max(1, -(-nbytes // self._piece_nbytes)) for nbytes in largest]
        plans = [pieces_of(draft, n) for draft, n in zip(drafts, numbers, strict=True)]
        return AllToAll(plans, self._device)

    def _begin(self, weights: Iterable[NamedTensor]) -> bool:
        """Take the shards as they are now, and make ready what an exchange needs; collective.

        Returns:
            True on all ranks if it can be done; else all is planned anew.
        """
        plan = self._plan
        assert plan is not None, "see learn"

        def begin() -> None:
            if self._stream.buckets != plan.buckets:
                raise SourcesChanged("the export is cut into other buckets")
            now = self._source_map.current(weights, plan.traced)
            plan.exchange.begin(_Shards(plan.traced.names, now))

        _, reason = result_or_reason(begin, SourcesChanged)
        agreed = common_reason(self._group, reason)
        if agreed is not None:
            self.forget()
            logger.info("shards are not exchanged in this sync: %s", agreed)
        return agreed is None

    def _prove(self, weights: Iterable[NamedTensor]) -> str | None:
        """Exchange every bucket once, and compare it with the full export; collective.

        Returns:
            Why shards are not exchanged, equal on all ranks; None if they are from now on.
        """
        assert self._plan is not None
        plan, report = self._plan, SyncReport(mode="compiled", replica=0)  # of no sync
        batches = self._stream.batches(Export(weights), report)
        problem = compare_with_export(
            plan.exchange, plan.buckets, plan.arrangements, batches, self._device
        )
        plan.exchange.drain()
        plan.exchange.end()
        return common_reason(self._group, problem)


class ExchangedBuckets(SyncSource):
    """The buckets of one sync, out of the ranks' shards; each step is collective.

    Args:
        plan: whose exchange has begun; the engines must hold the arrangements that it is for.
        ring: of this rank's staging buffers.
        report: gets the counts and the seconds of "gather".
    """

    def __init__(self, plan: ExchangePlan, ring: StagingRing, report: SyncReport) -> None:
        self.needs_arrangements = (plan.arranged.digest,)
        self._plan = plan
        self._ring = ring
        self._report = report
        self._has_begun = False

    def engines_joined(self, held: Sequence[str]) -> None:
        """See `SyncSource`; from here on the ranks wait for each other."""
        self._has_begun = True

    def __iter__(self) -> Iterator[ReadyBucket]:
        report, exchange = self._report, self._plan.exchange
        sizes = [arrangement.nbytes for arrangement in self._plan.arrangements]
        self._ring.prepare(sizes)
        for index, bucket in enumerate(self._plan.buckets):
            with report.stage("gather"):
                storage = self._ring.fill(index, sizes[index], partial(exchange.fill, index))
            report.count_bucket(len(bucket.layout.tensors), bucket.payload_bytes)
            report.num_exchanged += 1
            report.staging_bytes = max(report.staging_bytes, self._ring.nbytes + exchange.nbytes)
            yield ReadyBucket(
                index,
                bucket,
                storage=storage,
                arranged=self._plan.digest_for(index),
                nbytes=sizes[index],
            )

    def drain(self) -> None:
        """Send what the other ranks still wait for."""
        if self._has_begun:
            self._plan.exchange.drain()


def _of_this_rank(
    everyones: Sequence[Sequence[Arrangement]], buckets: Sequence[Bucket], traced: TracedExport
) -> list[BucketExchange]:
    """What this rank does for each bucket; pure.

    Args:
        everyones: arrangements by rank, then by bucket.
        buckets: of the export.
        traced: where its tensors come from.
    """
    rank = own_rank()
    return [
        plan_bucket(
            rank,
            [arrangements[index] for arrangements in everyones],
            traced.origins_of(bucket.layout),
            traced.owners,
        )
        for index, bucket in enumerate(buckets)
    ]


class _Shards:
    """This rank's shards; each one's bytes are looked up when they are first asked for, while
    others travel.
    """

    def __init__(self, names: Sequence[str], now: Mapping[str, torch.Tensor]) -> None:
        self._names = names
        self._now = now
        self._known: dict[int, torch.Tensor] = {}

    def __getitem__(self, position: int, /) -> torch.Tensor:
        found = self._known.get(position)
        if found is None:
            found = self._known[position] = memory_of(self._now[self._names[position]])
        return found
