"""How a session uses the exchange of shards: when, with which arrangements, and bucket by bucket.

    turn = exchange.turn(weights, stream.cuts)            # while the engine joins
    buckets = exchange.buckets(...)                       # where all engines hold what was prepared
    exchange.learn(weights, stream, arrangements, turn)   # after a good sync that was exported

Collective, all three, and so is each bucket; whoever fails drains the buckets that are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from sglang_loader.load_plan import BucketLayout
from sglang_loader.load_plan.arrangement import Arrangement
from verl_sglang_sync.arranged_sending import ArrangedTurn, KnownArrangements
from verl_sglang_sync.bucket_stream import Batch, BucketStream, Cut
from verl_sglang_sync.collective import TrainerGroup
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.packing import NamedTensor
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.session_buckets import ReadyBucket
from verl_sglang_sync.session_staging import StagingRing
from verl_sglang_sync.shard_exchange import ShardExchange, Turn, whole_bucket
from verl_sglang_sync.traced_export.agreement import holds_everywhere
from verl_sglang_sync.traced_export.known_sources import sources_of
from verl_sglang_sync.weight_sync import Export

PIECES_PER_BUCKET = 4
"""A rank sends, and receives, this part of a bucket at a time: the scratch, for two pieces each
way, is no larger than a bucket.
"""


class SessionExchange:
    """Of one trainer rank, for all its sessions.

    Args:
        settings: the preset.
        group: the trainer's ranks.
        device: of the engine on this rank.
    """

    def __init__(
        self, settings: WeightSyncConfig, group: TrainerGroup, device: torch.device
    ) -> None:
        self._is_wanted = settings.exchange_shards and settings.plan_ordered
        self._group = group
        self._exchange = ShardExchange(
            group,
            device,
            piece_nbytes=settings.bucket_bytes // PIECES_PER_BUCKET,
            recheck_every_n_syncs=settings.recheck_every_n_syncs,
        )
        self._digest: str | None = None

    @property
    def is_prepared(self) -> bool:
        """False: `turn` has nothing to look at; equal on all ranks."""
        return self._exchange.is_prepared

    def turn(self, weights: Iterable[NamedTensor], cuts: Sequence[Cut]) -> Turn:
        """What all ranks do in this sync."""
        return self._exchange.ready(weights, [cut.bucket.layout for cut in cuts])

    def holds(self, turn: ArrangedTurn) -> bool:
        """True if this rank's buckets are still read as they were when all was prepared."""
        return turn.digest == self._digest

    def buckets(
        self, cuts: Sequence[Cut], turn: ArrangedTurn, ring: StagingRing, report: SyncReport
    ) -> ExchangedBuckets:
        """The buckets of this sync, filled one after the other."""
        return ExchangedBuckets(self._exchange, cuts, turn, ring, report)

    def learn(
        self,
        weights: Iterable[NamedTensor],
        stream: BucketStream,
        known: KnownArrangements | None,
        turn: Turn,
        *,
        is_settled: bool,
    ) -> None:
        """Prepare, and prove, that the next syncs exchange shards.

        Args:
            weights: the export of the sync before.
            stream: its buckets.
            known: what this rank's engine reads; None: all of every bucket.
            turn: of the sync before.
            is_settled: buckets are packed, and the engine will not say later what it reads.
        """
        # A check is due on all ranks, also where the engine has loaded this sync eagerly.
        if turn is not Turn.CHECK and not holds_everywhere(self._group, is_settled):
            return
        digest = "" if known is None else known.digest
        if not holds_everywhere(self._group, self._exchange.is_prepared and digest == self._digest):
            layouts = [cut.bucket.layout for cut in stream.cuts]
            everyones: list[Any] = [None] * dist.get_world_size()
            own = [None] * len(layouts) if known is None else [read for _, read in known.buckets]
            dist.all_gather_object(everyones, own)
            by_rank = [_completed(arrangements, layouts) for arrangements in everyones]
            self._digest = digest
            if self._exchange.prepare(weights, by_rank, layouts) is not None:
                return
        elif turn is not Turn.CHECK:
            return
        report = SyncReport(mode="compiled", replica=0)  # of no sync
        batches = stream.batches(Export(weights), report)
        self._exchange.prove(weights, ((b.bucket.layout, b.tensors) for b in batches))

    def free(self) -> None:
        """Give the scratch back."""
        self._exchange.free()

    def can_learn(self, weights: Iterable[NamedTensor]) -> bool:
        """False if shards are never exchanged; equal on all ranks, whose exports are of a kind."""
        return (
            self._is_wanted
            and self._exchange.off is None
            and sources_of(weights) is not None
            and dist.is_initialized()
            and dist.get_world_size() > 1
        )


class ExchangedBuckets:
    """The buckets of one sync, out of the ranks' shards; each step is collective.

    Args:
        exchange: ready.
        cuts: the buckets.
        turn: settled.
        ring: of this rank's staging buffers.
        report: gets the counts and the seconds of "gather".
    """

    def __init__(
        self,
        exchange: ShardExchange,
        cuts: Sequence[Cut],
        turn: ArrangedTurn,
        ring: StagingRing,
        report: SyncReport,
    ) -> None:
        self._exchange = exchange
        self._cuts = cuts
        self._turn = turn
        self._ring = ring
        self._report = report

    def __iter__(self) -> Iterator[ReadyBucket]:
        report = self._report
        self._ring.prepare(self._cuts, turn=self._turn)
        for index, cut in enumerate(self._cuts):
            bucket = cut.bucket
            arrangement = self._turn.of(index, bucket)
            nbytes = bucket.layout.nbytes if arrangement is None else arrangement.nbytes
            with report.stage("gather"):
                storage = self._ring.fill(index, nbytes, partial(self._exchange.fill, index))
            report.count_bucket(len(bucket.layout.tensors), bucket.payload_bytes)
            report.num_exchanged += 1
            held = self._ring.nbytes + self._exchange.nbytes
            report.staging_bytes = max(report.staging_bytes, held)
            batch = Batch(index, bucket, [])
            if arrangement is None:
                yield ReadyBucket(batch, storage=storage)
            else:
                digest = self._turn.digest
                yield ReadyBucket(batch, storage=storage, arranged=digest, nbytes=nbytes)

    def drain(self) -> None:
        """Send what the other ranks still wait for."""
        self._exchange.drain()


def _completed(
    arrangements: Sequence[Arrangement | None], layouts: Sequence[BucketLayout]
) -> list[Arrangement]:
    """With a whole bucket where the engine has no arrangement."""
    pairs = zip(arrangements, layouts, strict=True)
    return [whole_bucket(layout) if found is None else found for found, layout in pairs]
