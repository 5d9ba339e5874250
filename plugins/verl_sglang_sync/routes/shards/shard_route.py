"""Base of the routes "exchange" and "send": a plan of the bytes that each rank sends.

The plan is made once. A trace of the export locates each byte that an engine rank reads in a shard.
A bucket then takes one or more all-to-alls instead of the full export. The proof of the route
(`session.proof` of the engine) checks that the engines get the same bytes.

The routes differ in the readers. In "exchange" each trainer rank reads for its own engine rank. In
"send" the engine ranks are ranks of the process group themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain

import msgspec
import torch

from sglang_loader.common.ranks import Reason, attempt
from sglang_loader.common.regions.arrangement import Arrangement
from sglang_loader.common.session.messages import encode_pieces
from verl_sglang_sync.engine.arrangements import RankArrangements
from verl_sglang_sync.ranks import own_rank
from verl_sglang_sync.report import SyncReport, warn_once
from verl_sglang_sync.routes.route import ExportedSync, Route, RouteContext, RouteState, SyncSource
from verl_sglang_sync.routes.shards.all_to_all import AllToAll
from verl_sglang_sync.routes.shards.exchange_plan import (
    Received,
    Sends,
    pieces_of,
    plan_reader,
    plan_sends,
    received,
    total_nbytes,
)
from verl_sglang_sync.sources.bucket_cutter import Bucket
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sources.export_trace import NotTraceable, TracedExport
from verl_sglang_sync.sources.shard_reads import Origin, whole_bucket
from verl_sglang_sync.sources.snapshot import SourcesChanged, locals_of

NOTHING: Arrangement = ()
"""The arrangement of a rank that reads no bytes."""


@dataclass(frozen=True)
class ShardPlan:
    """The bytes that this rank sends and its engine ranks receive, and the inputs of the plan.

    Attributes:
        reads: by bucket, the arrangement that each rank of the group reads.
        first_reader: rank of the first engine rank in the group. Earlier ranks read nothing.
        arrangements: the arrangements of this rank's engine ranks.
        received: by bucket and engine rank of this rank, the locations in the receive buffer.
        sends: by bucket, the parts that this rank sends.
        all_to_all: executes the sends of this rank.
    """

    traced: TracedExport
    buckets: list[Bucket]
    reads: list[list[Arrangement]]
    first_reader: int
    arrangements: Sequence[RankArrangements]
    received: list[list[Received]]
    sends: list[Sends]
    all_to_all: AllToAll

    @cached_property
    def pieces_in(self) -> Callable[[int, int, int], bytes]:
        """A cached function that encodes the pieces of a bucket.

        Its arguments are the number of the bucket, the position of the receiver among this rank's
        engine ranks, and the slot of the receive buffer.
        """

        def pieces_in(index: int, reader: int, slot: int) -> bytes:
            pieces = self.received[index][reader].pieces
            return encode_pieces([msgspec.structs.replace(piece, slot=slot) for piece in pieces])

        return cache(pieces_in)

    @cached_property
    def pair_bytes(self) -> list[list[int]]:
        """Numbers of bytes in a sync, by trainer rank that sends and engine rank of this rank."""
        by_reader = list(zip(*self.received, strict=True))
        return [
            [sum(bucket.payloads[rank] for bucket in buckets) for buckets in by_reader]
            for rank in range(self.first_reader)
        ]


class ShardBuckets(SyncSource):
    """The buckets of one sync by a plan, for engines that hold the arrangements of the plan.

    The all-to-all of the plan has begun.
    """

    def __init__(self, plan: ShardPlan, report: SyncReport) -> None:
        self.required_arrangements = [reader.digest for reader in plan.arrangements]
        self.plan = plan
        self.report = report


class ShardRoute(Route):
    """Base of the routes by a `ShardPlan`.

    Args:
        piece_nbytes: the most bytes that a rank sends at a time.
    """

    def __init__(self, context: RouteContext, piece_nbytes: int) -> None:
        super().__init__(context, is_wanted="exchange" in context.settings.routes)
        self._piece_nbytes = piece_nbytes
        self._plan: ShardPlan | None = None

    def _source_of(self, plan: ShardPlan, report: SyncReport) -> ShardBuckets:
        """Create the source of a sync whose all-to-all has begun."""
        raise NotImplementedError

    def _reserve(self, plan: ShardPlan) -> None:
        """Allocate the memory for buckets. A rank that fails later would keep others waiting."""

    def _source(self, weights: Iterable[NamedTensor], report: SyncReport) -> SyncSource | None:
        with report.stage("confirm"):  # while the engines join
            if not self._begin(weights):
                return None
        assert self._plan is not None
        return self._source_of(self._plan, report)

    def learn(self, sync: ExportedSync) -> bool:
        own = [reader.matching(self._cutter.buckets) for reader in self._readers()]
        # Wait for every engine's load plan, because an engine reports its arrangements with it.
        is_final = all(
            reader.digest or outcome.may_read_in_place or not outcome.num_eager
            for reader, outcome in zip(own, sync.loaded, strict=True)
        )
        if self._plan is None and not self._ranks.all(is_final):
            return False
        is_planned = self._plan is not None and self._plan.arrangements == own
        all_planned = self._ranks.all(is_planned)
        self._conclude(None if all_planned else self._make_plan(sync.weights, own))
        return False  # exported buckets need staging buffers

    def forget(self) -> None:
        super().forget()
        self.free_scratch()
        self._plan = None

    def free_scratch(self) -> None:
        if self._plan is not None:
            self._plan.all_to_all.end()

    def _make_plan(
        self, weights: Iterable[NamedTensor], own: Sequence[RankArrangements]
    ) -> Reason | None:
        """Plan the bytes of shards that each engine rank gets. Collective.

        Returns:
            The reason of a failure, or None.
        """
        self.forget()
        if (reason := self._source_map.trace(weights)) is not None:
            return reason
        traced, buckets = self._source_map.traced, self._cutter.buckets
        gathered, start = self._gather_arrangements(own)
        first = self._first_reader
        reads: list[list[Arrangement]] = []
        origins: list[list[Origin]] = []

        def draft() -> list[Sends]:
            for index, bucket in enumerate(buckets):
                whole = whole_bucket(bucket.layout)  # for engine ranks without arrangements
                arrangements = [reader.expected(index, whole) for reader in gathered]
                reads.append([NOTHING] * first + arrangements)
                origins.append(traced.origins_of(bucket.layout))
            pairs = zip(reads, origins, strict=True)
            return [plan_sends(own_rank(), *pair, traced.owners) for pair in pairs]

        sends, reason = attempt(draft, NotTraceable)
        sizes = None if sends is None else [total_nbytes(chain(*of_bucket)) for of_bucket in sends]
        needs = self._ranks.gather(sizes)
        if sends is not None and None not in needs:
            largest = [max(of_bucket) for of_bucket in zip(*needs, strict=True)]
            nums = [max(1, -(-nbytes // self._piece_nbytes)) for nbytes in largest]

            def make() -> ShardPlan:
                readers = range(first + start, first + start + len(own))
                locations: list[list[Received]] = []
                for by_rank, places, num in zip(reads, origins, nums, strict=True):
                    parts = [
                        plan_reader(reader, len(by_rank), by_rank[reader], places, traced.owners)
                        for reader in readers
                    ]
                    locations.append([received(receives, num) for receives in parts])
                pieces = [pieces_of(bucket, num) for bucket, num in zip(sends, nums, strict=True)]
                moves = AllToAll(pieces, self._device)
                return ShardPlan(traced, buckets, reads, first, own, locations, sends, moves)

            self._plan, reason = attempt(make)
            self._prepared_for = self._readers()
        agreed = self._ranks.common_reason(reason)
        if agreed is not None:
            self._plan = None
        return agreed

    def _gather_arrangements(
        self, own: Sequence[RankArrangements]
    ) -> tuple[list[RankArrangements], int]:
        """Gather the arrangements of all engine ranks, in the order of the trainer ranks.

        This method is collective.

        Returns:
            The arrangements, and the position of this rank's first engine rank.
        """
        # Arrangements with the same digest are equal. Only the first of them is sent.
        by_rank = self._ranks.gather([reader.digest for reader in own])
        digests = [digest for of_rank in by_rank for digest in of_rank]
        start = sum(len(of_rank) for of_rank in by_rank[: own_rank()])
        sent = [
            reader if digests.index(reader.digest) == position else None
            for position, reader in enumerate(own, start)
        ]
        by_digest = {
            reader.digest: reader
            for of_rank in self._ranks.gather(sent)
            for reader in of_rank
            if reader is not None
        }
        return [by_digest[digest] for digest in digests], start

    def _begin(self, weights: Iterable[NamedTensor]) -> bool:
        """Begin the all-to-all of the plan with the present shards. Collective.

        Returns:
            False if the sync must be exported.
        """
        plan = self._plan
        assert plan is not None, "a prepared route has a plan"

        def begin() -> None:
            if self._cutter.buckets != plan.buckets:
                raise SourcesChanged("the export is cut into other buckets")
            if self._have_changed():
                raise SourcesChanged("the set of engines has changed")
            sources = self._source_map.current(weights, plan.traced)
            rank, nothing = own_rank(), torch.empty(0, device=self._device)
            shards = [
                sources[parameter.source] if parameter.owners.is_held_by(rank) else nothing
                for parameter in plan.traced.parameters
            ]
            plan.all_to_all.begin(locals_of(shards))
            self._reserve(plan)

        _, agreed = self._ranks.step(begin, passing=(SourcesChanged,))
        if agreed is not None and self.state is RouteState.LEARNT:
            self.refuse(agreed)
        elif agreed is not None:
            self.forget()
            warn_once(f"weight sync: full export for this sync: {agreed}")
        return agreed is None
