"""Route "exchange": the ranks fill their engines' staging buffers from each other's shards.

    source = exchange.choose(weights, report)       # while the engine joins
    exchange.learn(weights, loaded)                 # after a good sync that was exported

Each bucket is collective, too; whoever fails drains the buckets that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.arrangement import Arrangement
from sglang_loader.common.session.messages import Loaded
from verl_sglang_sync.collective import TrainerGroup, holds_everywhere, world_size
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.session import TrainerSession
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.arranged_sending import (
    ArrangedSync,
    EngineArrangements,
    KnownArrangements,
)
from verl_sglang_sync.routes.exchange.shard_exchange import ShardExchange
from verl_sglang_sync.routes.route import ReadyBucket, Recovery
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.sources.bucket_stream import BucketStream, Cut
from verl_sglang_sync.sources.export import Export, NamedTensor
from verl_sglang_sync.sources.known_sources import sources_of
from verl_sglang_sync.sources.source_map import SourceMap
from verl_sglang_sync.sources.transfer_plan import whole_bucket

PIECES_PER_BUCKET = 4
"""A rank sends, and receives, this part of a bucket at a time: the scratch, for two pieces each
way, is no larger than a bucket.
"""


class Exchange:
    """A `Route`.

    Args:
        settings: the preset.
        group: the trainer's ranks.
        device: of the engine on this rank.
        source_map: of the export.
        stream: its buckets.
        arrangements: what this rank's engine reads of them.
        ring: this rank's staging buffers.
    """

    def __init__(
        self,
        settings: WeightSyncConfig,
        group: TrainerGroup,
        device: torch.device,
        source_map: SourceMap,
        *,
        stream: BucketStream,
        arrangements: EngineArrangements,
        ring: StagingRing,
    ) -> None:
        self._is_wanted = settings.exchange_shards
        self._group = group
        self._stream = stream
        self._arrangements = arrangements
        self._ring = ring
        self._exchange = ShardExchange(
            group,
            device,
            source_map,
            piece_nbytes=settings.bucket_bytes // PIECES_PER_BUCKET,
            recheck_every_n_syncs=settings.recheck_every_n_syncs,
        )
        self._prepared_for: KnownArrangements | None = None  # None: for whole buckets

    def choose(self, weights: Iterable[NamedTensor], report: SyncReport) -> ExchangedBuckets | None:
        """See `Route`."""
        is_ready = False
        if self._exchange.is_prepared:
            with report.stage("confirm"):  # while the engine joins
                layouts = [cut.bucket.layout for cut in self._stream.cuts]
                is_ready = self._exchange.ready(weights, layouts)
        if not is_ready:
            return None
        arranged = ArrangedSync(self._prepared_for)
        return ExchangedBuckets(self._exchange, self._stream.cuts, arranged, self._ring, report)

    def can_learn(self, weights: Iterable[NamedTensor]) -> bool:
        """See `Route`."""
        return (
            self._is_wanted
            and self._exchange.off is None
            and sources_of(weights) is not None
            and world_size() > 1
        )

    def learn(self, weights: Iterable[NamedTensor], loaded: Loaded) -> bool:
        """See `Route`."""
        known = self._arrangements.fitting(cut.bucket for cut in self._stream.cuts)
        # An engine that has replayed its plan has said what it reads, unless that is all. A proof
        # that is due is due on all ranks, also where the engine has loaded this sync eagerly.
        is_final = known is not None or not loaded.num_eager
        if not (self._exchange.needs_proof or holds_everywhere(self._group, is_final)):
            return False
        is_prepared = self._exchange.is_prepared and known == self._prepared_for
        if not holds_everywhere(self._group, is_prepared):
            layouts = [cut.bucket.layout for cut in self._stream.cuts]
            own = [None] * len(layouts) if known is None else [read for _, read in known.buckets]
            everyones = self._group.all_gather(own)
            by_rank = [_completed(arrangements, layouts) for arrangements in everyones]
            self._prepared_for = known
            if self._exchange.prepare(weights, by_rank, layouts) is not None:
                return False
        if not self._exchange.needs_proof:
            return False
        report = SyncReport(mode="compiled", replica=0)  # of no sync
        batches = self._stream.batches(Export(weights), report)
        self._exchange.prove(weights, ((b.bucket.layout, b.tensors) for b in batches))
        return False  # they are exchanged into staging buffers

    def recover(self, cause: Exception | None, weights: Iterable[NamedTensor]) -> Recovery:
        """See `Route`."""
        return Recovery.RAISE

    def forget(self) -> None:
        """See `Route`; the engine says anew what it reads."""
        self._exchange.forget()

    def rest(self) -> None:
        """Give the scratch back."""
        self._exchange.free()


class ExchangedBuckets:
    """The buckets of one sync, out of the ranks' shards; each step is collective.

    Args:
        exchange: ready.
        cuts: the buckets.
        arranged: what was prepared: what this rank's engine reads; the engines must hold it.
        ring: of this rank's staging buffers.
        report: gets the counts and the seconds of "gather".
    """

    is_packed = True

    def __init__(
        self,
        exchange: ShardExchange,
        cuts: Sequence[Cut],
        arranged: ArrangedSync,
        ring: StagingRing,
        report: SyncReport,
    ) -> None:
        self.needs_arrangements = arranged.digest
        self._exchange = exchange
        self._cuts = cuts
        self._arranged = arranged
        self._ring = ring
        self._report = report
        self._has_begun = False

    def __iter__(self) -> Iterator[ReadyBucket]:
        report = self._report
        self._ring.prepare(self._cuts, arranged=self._arranged)
        for index, cut in enumerate(self._cuts):
            bucket = cut.bucket
            arrangement = self._arranged.of(index, bucket)
            nbytes = bucket.layout.nbytes if arrangement is None else arrangement.nbytes
            with report.stage("gather"):
                storage = self._ring.fill(index, nbytes, partial(self._exchange.fill, index))
            report.count_bucket(len(bucket.layout.tensors), bucket.payload_bytes)
            report.num_exchanged += 1
            held = self._ring.nbytes + self._exchange.nbytes
            report.staging_bytes = max(report.staging_bytes, held)
            arranged = "" if arrangement is None else self._arranged.digest
            yield ReadyBucket(index, bucket, storage=storage, arranged=arranged, nbytes=nbytes)

    def start(self, has_arrived: Callable[[], bool]) -> None:
        """Nothing to do: how the buckets may come is not known yet."""

    def engine_joined(self, held: str) -> None:
        """See `SyncSource`; from here on the ranks wait for each other."""
        self._arranged.keep_if_held(held)
        self._has_begun = True

    def map_memory(self, session: TrainerSession) -> None:
        """Nothing to do: staging buffers are mapped with the buckets in them."""

    def confirm(self) -> None:
        """Nothing to do: the shards were looked at when this was chosen."""

    def end(self) -> None:
        """Nothing to do."""

    def drain(self) -> None:
        """Send what the other ranks still wait for."""
        if self._has_begun:
            self._exchange.drain()


def _completed(
    arrangements: Sequence[Arrangement | None], layouts: Sequence[BucketLayout]
) -> list[Arrangement]:
    """With a whole bucket where the engine has no arrangement."""
    pairs = zip(arrangements, layouts, strict=True)
    return [whole_bucket(layout) if found is None else found for found, layout in pairs]
