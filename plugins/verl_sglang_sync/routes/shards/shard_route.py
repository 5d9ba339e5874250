"""Base of the routes "exchange" and "send": a plan of what each rank sends, made once.

The export is traced, so that every rank knows which shard holds each byte that an engine rank
reads; each bucket then takes an all-to-all, or several, instead of the full export. The proof of
the route (`session.proof` of the engine) shows that engines get the same bytes so.

Who reads, and in which group, differs: each rank's own engine ("exchange"), or engine ranks that
are ranks of the group themselves ("send").
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


@dataclass(frozen=True)
class ShardPlan:
    """What this rank sends, and its engine ranks receive, and what that was planned for.

    Attributes:
        reads: by bucket, what each rank of the group reads.
        first_reader: rank of the first engine rank in the group; those before it read nothing.
        arrangements: of this rank's engine ranks.
        received: by bucket, where each of these finds it in what it receives.
        sends: by bucket, what this rank sends.
        all_to_all: executes it.
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
        """The encoded pieces of a bucket, given its number, the position of this rank's engine rank
        that receives it, and the slot of its buffer.
        """

        def pieces_in(index: int, reader: int, slot: int) -> bytes:
            pieces = self.received[index][reader].pieces
            return encode_pieces([msgspec.structs.replace(each, slot=slot) for each in pieces])

        return cache(pieces_in)

    @cached_property
    def pair_bytes(self) -> list[list[int]]:
        """Bytes that each trainer rank sends each engine rank of this rank, in this order."""
        return [
            [sum(each.payloads[rank] for each in of) for of in zip(*self.received, strict=True)]
            for rank in range(self.first_reader)
        ]


class ShardBuckets(SyncSource):
    """The buckets of one sync by a plan whose all-to-all has begun, for engines that hold the
    arrangements of the plan.
    """

    def __init__(self, plan: ShardPlan, report: SyncReport) -> None:
        self.required_arrangements = [each.digest for each in plan.arrangements]
        self.plan = plan
        self.report = report


class ShardRoute(Route):
    """Base of the routes by a `ShardPlan`; a rank sends, or receives, `piece_nbytes` at a time."""

    def __init__(self, context: RouteContext, piece_nbytes: int) -> None:
        super().__init__(context, is_wanted="exchange" in context.settings.routes)
        self._piece_nbytes = piece_nbytes
        self._plan: ShardPlan | None = None

    def _source_of(self, plan: ShardPlan, report: SyncReport) -> ShardBuckets:
        """The buckets of a sync, once the plan's all-to-all has begun."""
        raise NotImplementedError

    def _reserve(self, plan: ShardPlan) -> None:
        """Take the memory that buckets need now: a rank that fails later keeps others waiting."""

    def _source(self, weights: Iterable[NamedTensor], report: SyncReport) -> SyncSource | None:
        with report.stage("confirm"):  # while the engines join
            if not self._begin(weights):
                return None
        assert self._plan is not None
        return self._source_of(self._plan, report)

    def learn(self, sync: ExportedSync) -> bool:
        own = [reader.matching(self._cutter.buckets) for reader in self._readers()]
        # Wait for every engine's load plan, with which the engine offers its arrangements, if any.
        is_final = all(
            each.digest or outcome.may_read_in_place or not outcome.num_eager
            for each, outcome in zip(own, sync.loaded, strict=True)
        )
        if self._plan is None and not self._ranks.all(is_final):
            return False
        is_planned = self._plan is not None and self._plan.arrangements == own
        everywhere = self._ranks.all(is_planned)
        self._conclude(None if everywhere else self._make_plan(sync.weights, own))
        return False  # exported buckets need staging

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
        """Plan which shards' bytes engine ranks are sent; collective; returns why that failed."""
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
                of_readers = [each.expected(index, whole) for each in gathered]
                reads.append([NOTHING] * first + of_readers)
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
                readers, owners = range(first + start, first + start + len(own)), traced.owners
                found = [
                    [received(plan_reader(r, len(of), of[r], places, owners), num) for r in readers]
                    for of, places, num in zip(reads, origins, nums, strict=True)
                ]
                pieces = [pieces_of(each, num) for each, num in zip(sends, nums, strict=True)]
                moves = AllToAll(pieces, self._device)
                return ShardPlan(traced, buckets, reads, first, own, found, sends, moves)

            self._plan, reason = attempt(make)
            self._prepared_for = self._readers()
        agreed = self._ranks.joined(self._ranks.gather(reason))
        if agreed is not None:
            self._plan = None
        return agreed

    def _gather_arrangements(
        self, own: Sequence[RankArrangements]
    ) -> tuple[list[RankArrangements], int]:
        """The arrangements of all engine ranks, in the order of the trainer ranks, and where this
        rank's begin; collective. Of those with one digest, which are equal, only the first is sent.
        """
        by_rank = self._ranks.gather([each.digest for each in own])
        digests = [digest for of_rank in by_rank for digest in of_rank]
        start = sum(len(of_rank) for of_rank in by_rank[: own_rank()])
        is_first = [digests.index(each.digest) == start + i for i, each in enumerate(own)]
        sent = [each if first else None for each, first in zip(own, is_first, strict=True)]
        by_digest = {
            each.digest: each
            for of_rank in self._ranks.gather(sent)
            for each in of_rank
            if each is not None
        }
        return [by_digest[digest] for digest in digests], start

    def _begin(self, weights: Iterable[NamedTensor]) -> bool:
        """Take the shards as they are now; collective; False if all must be planned anew."""
        plan = self._plan
        assert plan is not None, "see learn"

        def begin() -> None:
            if self._cutter.buckets != plan.buckets:
                raise SourcesChanged("the export is cut into other buckets")
            if self._have_changed():
                raise SourcesChanged("other engines take part")
            now = self._source_map.current(weights, plan.traced)
            rank, nothing = own_rank(), torch.empty(0, device=self._device)
            shards = [
                now[each.source] if each.owners.is_held_by(rank) else nothing
                for each in plan.traced.parameters
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
