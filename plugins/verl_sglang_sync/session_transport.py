"""Mode "compiled": one request opens a session on all ranks, buckets go straight to the engine.

Every trainer rank has a session of its own with the engine rank on its device, so ranks are not in
step within a sync; they agree three times: everyone has joined, everyone has sent the same, every
replica is done. A rank that fails in between goes on exporting (the export's collectives need
it), then all leave together with the same `WeightSyncError`.

A bucket is read where it lies, or is packed: arranged (see `arranged_sending`) or whole; or the
ranks fill it from their shards, without an export (see `session_exchange`). Where all buckets are
read in place, the export is left out, too (see `session_in_place`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain

import torch

from sglang_loader.manifest import ManifestError
from sglang_loader.session_messages import BucketPiece, SessionError
from verl_sglang_sync.arranged_sending import ArrangedTurn, KnownArrangements
from verl_sglang_sync.collective import TrainerGroup
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.manifest_gate import Announcement, ManifestGate
from verl_sglang_sync.memory_blocks import BlockNames
from verl_sglang_sync.packing import NamedTensor
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.session_buckets import BucketMaker, ReadyBucket, emptied
from verl_sglang_sync.session_exchange import ExchangedBuckets, SessionExchange
from verl_sglang_sync.session_in_place import UnexportedBuckets, UnexportedSource
from verl_sglang_sync.session_ranks import OpeningRequest, RanksInStep
from verl_sglang_sync.shard_exchange import Turn
from verl_sglang_sync.trainer_session import SessionSockets, TrainerSession
from verl_sglang_sync.transport import Updater, ask_engine, check_before
from verl_sglang_sync.weight_sync import Export, WeightSyncError

logger = logging.getLogger(__name__)

MEET_TIMEOUT_S = 120.0
MEET_SLICE_S = 0.5


class SessionTransport:
    """`SyncTransport` of mode "compiled".

    Args:
        engine: the replica's server on its leader, None on the other ranks.
        settings: the preset.
        group: the trainer's ranks.
        device: of the engine's weights on this rank.
    """

    def __init__(
        self,
        *,
        engine: Updater | None,
        settings: WeightSyncConfig,
        group: TrainerGroup,
        device: torch.device,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._group = group
        self._device = device
        self._sockets = SessionSockets()
        self._maker = BucketMaker(settings, device)
        self._names = BlockNames()
        self._gate = ManifestGate(settings.manifest_check, group.agree)
        self._wants_arrangements = settings.plan_ordered
        self._arrangements: KnownArrangements | None = None
        self._exchange = SessionExchange(settings, group, device)
        self._unexported = UnexportedSource(
            group, device, recheck_every_n_syncs=settings.recheck_every_n_syncs
        )
        self._unanswered: OpeningRequest | None = None

    async def sync(
        self, weights: Iterable[NamedTensor], *, version: str | None, report: SyncReport
    ) -> None:
        """See `SyncTransport`."""
        is_unexported = self._unexported.is_due()
        try:
            await self._sync(weights, version, report, is_unexported=is_unexported)
        except WeightSyncError as error:
            if not is_unexported or not self._unexported.has_failed():
                raise
            logger.warning("the sync is made again, with the export: %s", error)
            report.restart()
            await self._sync(weights, version, report, is_unexported=False)

    def settle(self, report: SyncReport) -> None:
        """See `SyncTransport`."""
        request, self._unanswered = self._unanswered, None
        if request is not None:
            with report.stage("reply"):
                request.result()

    async def _sync(
        self,
        weights: Iterable[NamedTensor],
        version: str | None,
        report: SyncReport,
        *,
        is_unexported: bool,
    ) -> None:
        """One session; `is_unexported`: leave the export out."""
        await check_before(self._gate, weights, self._engine, report)
        is_last_resort = self._gate.must_check_in_parts(weights, "at its end")
        # A stream that is cut as the last one was is compared with that one anyway.
        announced = self._gate.is_confirmed and bool(self._maker.stream.cuts)
        ranks = RanksInStep(self._group)
        ranks.attempt(lambda: self.settle(report))
        request = OpeningRequest(self._engine, version)
        with ExitStack() as stack:
            stack.callback(self._rest)
            session = ranks.attempt(lambda: stack.enter_context(self._new_session()))
            with report.stage("open"):
                self._open(session, request, ranks)
            shards = Turn.FULL
            if not is_unexported and self._exchange.is_prepared:
                with report.stage("confirm"):  # while the engine joins
                    shards = self._exchange.turn(weights, self._maker.stream.cuts)
            turn = ArrangedTurn(self._arrangements)
            source: Export | ExchangedBuckets | UnexportedBuckets | None = None
            confirming: Iterator[None] | None = None
            ahead: deque[ReadyBucket] = deque()
            in_flight: deque[ReadyBucket] = deque()
            if shards is not Turn.EXCHANGE:
                if is_unexported:
                    source = self._unexported.buckets(weights, report)
                    buckets = iter(source)
                    confirming = self._unexported.confirm(weights, self._maker.stream.cuts)
                else:
                    source, buckets = self._exported(weights, report, turn, announced)
                has_arrived = session.has_arrived if session is not None else lambda: False
                ahead = ranks.take_part(lambda: self._maker.ahead(buckets, has_arrived)) or ahead
                ranks.attempt(lambda: _confirm(confirming, report, until=has_arrived))
            with report.stage("open"):
                met = self._meet(session, request, ranks)
            if met:
                turn.settle(_joined(session).arrangements)
                if source is not None:
                    ranks.attempt(lambda: self._maker.settle(ahead, turn, report))
                elif ranks.agree(met=self._exchange.holds(turn)):
                    source, buckets = self._exchanged(turn, report)
                else:  # an engine reads the buckets otherwise by now
                    shards = Turn.FULL
                    source, buckets = self._exported(weights, report, turn, announced)
                every = chain(emptied(ahead), buckets)
                ranks.attempt(lambda: self._send(_joined(session), every, report, ranks, in_flight))
                ahead.clear()
                ranks.attempt(partial(_confirm, confirming, report))
                source.drain()
                if ranks.agree():
                    ranks.attempt(lambda: self._commit(_joined(session), report, ranks))
            if source is not None:
                source.drain()
            if ranks.error is not None and session is not None:
                session.abort(ranks.error, request.check if request.may_have_left else None)
            # Where a stage follows, that looks at the reply: see `settle`.
            is_for_later = ranks.is_well and self._settings.free_cache_engine
            if not is_for_later:
                with report.stage("reply"):
                    request.wait()
                ranks.attempt(request.result)
            ranks.agree()  # also after a failure: nobody leaves while an engine is still busy
            in_flight.clear()
            if ranks.error is None:
                _joined(session).keep_socket()
                self._unanswered = request if is_for_later else None
        if ranks.error is not None:
            request.wait()
            self._gate.forget()
            self._unexported.forget()
            self._arrangements = None  # the next sync is whole
            raise WeightSyncError(ranks.error)
        if is_last_resort and isinstance(source, Export):
            announcement = Announcement.of(source.specs)
            answer = await ask_engine(self._engine, announcement)
            self._gate.settle(announcement, *answer, is_sent=True)
        self._gate.confirm()
        self._learn_to_leave_out(weights, shards, report)

    def _learn_to_leave_out(
        self, weights: Iterable[NamedTensor], shards: Turn, report: SyncReport
    ) -> None:
        """After a good sync: can the next ones do without the export?"""
        maker = self._maker
        if self._unexported.can_learn(weights):
            with report.stage("learn"):
                self._unexported.learn(weights, maker.in_place, maker.stream.cuts)
        if shards is not Turn.EXCHANGE and self._exchange.can_learn(weights):
            known = self._arrangements
            if known is not None and not known.fits(cut.bucket for cut in maker.stream.cuts):
                known = None
            # An engine that has replayed its plan has said what it reads, unless that is all.
            is_settled = maker.in_place is None and (known is not None or not report.num_eager)
            with report.stage("learn"):
                self._exchange.learn(weights, maker.stream, known, shards, is_settled=is_settled)

    def _new_session(self) -> TrainerSession:
        return TrainerSession(self._sockets, self._settings, self._names, self._maker.used)

    def _open(
        self, session: TrainerSession | None, request: OpeningRequest, ranks: RanksInStep
    ) -> None:
        """Gather the ranks' invitations and post them; all ranks join the gather."""
        gathered = self._group.gather(b"" if session is None else session.invitation)
        if gathered is not None and all(gathered):
            ranks.attempt(lambda: request.post(gathered))

    def _meet(
        self, session: TrainerSession | None, request: OpeningRequest, ranks: RanksInStep
    ) -> bool:
        """Wait, all ranks in step, until each has met its engine rank; False after a failure.

        Only the leader has a request that can fail: the others learn of it here.
        """
        limit_s = min(MEET_TIMEOUT_S, self._settings.request_timeout_s)
        deadline, has_met = time.monotonic() + limit_s, False

        def meet() -> bool:
            request.check()
            if has_met or _joined(session).greet(request.check, wait_s=MEET_SLICE_S):
                return True
            if time.monotonic() > deadline:
                raise SessionError(f"the engine did not join within {limit_s:g} s")
            return False

        while ranks.error is None:
            has_met = bool(ranks.attempt(meet))
            if ranks.agree(met=has_met):
                return True
        return False

    def _exported(
        self,
        weights: Iterable[NamedTensor],
        report: SyncReport,
        turn: ArrangedTurn,
        announced: bool,
    ) -> tuple[Export, Iterator[ReadyBucket]]:
        """The buckets of the full export."""
        source = self._gate.export(weights, compared=not announced)
        return source, self._maker.exported(source, report, turn, announced=announced)

    def _exchanged(
        self, turn: ArrangedTurn, report: SyncReport
    ) -> tuple[ExchangedBuckets, Iterator[ReadyBucket]]:
        """The buckets out of the ranks' shards."""
        source = self._exchange.buckets(self._maker.stream.cuts, turn, self._maker.ring, report)
        return source, iter(source)

    def _send(
        self,
        session: TrainerSession,
        buckets: Iterable[ReadyBucket],
        report: SyncReport,
        ranks: RanksInStep,
        in_flight: deque[ReadyBucket],
    ) -> None:
        """Send every bucket; the engine may still be at the last ones, those in `in_flight`.

        What is read in place needs no buffer, so that nothing is waited for.
        """
        packed: deque[int] = deque()  # those of them that occupy a staging buffer
        for bucket in buckets:
            index, planned = bucket.batch.index, bucket.batch.bucket
            session.load(
                index,
                planned,
                self._pieces(session, bucket),
                read_only=bucket.storage is None,
                arranged=bucket.arranged,
            )
            ranks.sent(planned)
            report.num_arranged += bool(bucket.arranged)
            report.sent_bytes += bucket.nbytes or planned.payload_bytes
            in_flight.append(bucket)
            if bucket.storage is not None:
                packed.append(index)
            if planned.is_last:  # no buffer is waited for
                continue
            while packed and packed[0] <= index + 1 - self._maker.ring.num_buffers:
                with report.stage("load"):
                    session.wait_until_done(packed[0])
                while in_flight and in_flight[0].batch.index <= packed[0]:
                    in_flight.popleft()
                packed.popleft()
        if not ranks.num_buckets:
            raise ValueError("the trainer exported no tensor")

    def _pieces(self, session: TrainerSession, bucket: ReadyBucket) -> list[BucketPiece]:
        """Where the engine finds the bucket; blocks that it does not know are mapped."""
        if bucket.storage is not None:
            keep = self._settings.keep_staging_buffers
            slot = session.map_buffer(bucket.storage, keep=keep)
            nbytes = bucket.nbytes or bucket.batch.bucket.layout.nbytes
            return [BucketPiece(slot, 0, 0, nbytes)]
        assert bucket.located is not None, "a bucket is packed or in place"
        return session.map_located(bucket.located, bucket.holders or bucket.batch.tensors)

    def _commit(self, session: TrainerSession, report: SyncReport, ranks: RanksInStep) -> None:
        session.commit(
            num_buckets=ranks.num_buckets,
            num_tensors=ranks.num_tensors,
            arrangements=self._known_digest(),
        )
        with report.stage("load"):
            session.wait_until_done(ranks.num_buckets - 1)
        with report.stage("commit"):
            outcome = session.outcome()
        with report.stage("publish"):
            session.wait_until_published()
        report.num_replayed, report.num_eager = outcome.num_replayed, outcome.num_eager
        report.eager_reason, report.engine_seconds = outcome.reason, outcome.seconds
        self._maker.choose_source(outcome, session.read_in_place)
        if outcome.arrangements is not None:
            self._learn(outcome.arrangements)

    def _known_digest(self) -> str | None:
        """Of the arrangements that this rank knows; None where it could not use any."""
        if not self._wants_arrangements or not self._maker.stream.cuts:
            return None
        return self._arrangements.digest if self._arrangements is not None else ""

    def _learn(self, encoded: bytes) -> None:
        """From the next sync on, send what the engine rank reads."""
        sent = [cut.bucket for cut in self._maker.stream.cuts]
        try:
            self._arrangements = KnownArrangements.of(encoded, sent)
        except ManifestError as error:
            self._wants_arrangements = False
            logger.warning(
                "buckets are sent whole, the engine's arrangements do not fit: %s", error
            )
            return
        self._maker.ring.free()  # its buffers have room for whole buckets

    def _rest(self) -> None:
        self._exchange.free()
        self._unexported.rest()
        if not self._settings.keep_staging_buffers:
            self._maker.ring.free()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # what the engine has let go of


def _confirm(
    confirming: Iterator[None] | None,
    report: SyncReport,
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Take the steps of a confirmation, if there is one, as long as there is time."""
    if confirming is None:
        return
    with report.stage("confirm"):
        for _ in confirming:
            if until():
                break


def _joined(session: TrainerSession | None) -> TrainerSession:
    assert session is not None, "a rank without a session has failed"
    return session
