"""One sync: a request opens a session on all ranks, buckets go straight to the engine.

Every trainer rank has a session of its own with the engine rank on its device, so ranks are not in
step within a sync; they agree three times: everyone has joined; everyone has sent the same, and its
engine has read it (only then is anything published); every replica is done. A rank that fails in
between goes on exporting (the export's collectives need it), then all leave together with the same
`WeightSyncError`.

Where the buckets come from is chosen once the request has left (`_choose`): the engines pull them
out of the ranks' parameters (`routes.pull`), the ranks exchange what their engines read
(`routes.exchange`), or verl's full export is packed (`routes.sync_source`). A pull that turns out
not to hold is made again, once: from where the parameters are now, or with the export.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import ExitStack

import torch

from sglang_loader.common.layout import WireError
from sglang_loader.common.session.messages import BucketPiece, Loaded, SessionError
from verl_sglang_sync.collective import STEP_S, RankLost, TrainerGroup, WeightSyncError
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.server_client import ReplyLost
from verl_sglang_sync.engine.session import EngineFailed, SessionSockets, TrainerSession
from verl_sglang_sync.report import SyncReport, warn_once
from verl_sglang_sync.routes.arranged_sending import ArrangedSync, KnownArrangements
from verl_sglang_sync.routes.exchange import ExchangedBuckets, SessionExchange
from verl_sglang_sync.routes.pull import NOT_IN_PLACE, Pull, Recovery
from verl_sglang_sync.routes.shard_exchange import SyncKind
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.routes.sync_source import (
    ExportedBuckets,
    PulledBuckets,
    ReadyBucket,
    SyncSource,
)
from verl_sglang_sync.sources.bucket_stream import BucketStream
from verl_sglang_sync.sources.export import Export, NamedTensor
from verl_sglang_sync.sources.known_sources import sources_of
from verl_sglang_sync.sources.memory_blocks import BlockNames
from verl_sglang_sync.sources.source_map import SourceMap
from verl_sglang_sync.sync.ranks_in_step import OpeningRequest, RanksInStep, Updater

logger = logging.getLogger(__name__)

MEET_TIMEOUT_S = 120.0
GIVE_UP_S = 5.0
"""How long a failed sync waits for the reply, so that the engine is done when the ranks leave."""


class SessionTransport:
    """Carries the syncs of one replica; lives in every trainer process, for all its syncs.

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
        if device.type == "cpu":  # by the other strategy memory moves when it is shared by name
            torch.multiprocessing.set_sharing_strategy("file_system")
        self._engine = engine
        self._settings = settings
        self._group = group
        self._device = device
        self._sockets = SessionSockets()
        self._stream = BucketStream(settings.bucket_bytes)
        self._ring = StagingRing(
            device,
            num_buffers=settings.num_staging_buffers,
            bucket_bytes=settings.bucket_bytes,
        )
        self._names = BlockNames()
        self._wants_arrangements = settings.uses_plan
        self._arrangements: KnownArrangements | None = None
        source_map = SourceMap(group, device)
        self._exchange = SessionExchange(settings, group, device, source_map)
        self._pull = Pull(
            group,
            device,
            source_map,
            is_wanted=settings.read_in_place,
            record=lambda handle: self._sockets.folder.record(handle),
            recheck_every_n_syncs=settings.recheck_every_n_syncs,
        )
        self._is_pulled = False
        self._unanswered: OpeningRequest | None = None

    async def sync(
        self, weights: Iterable[NamedTensor], *, version: str | None, report: SyncReport
    ) -> None:
        """Send all of `weights`; every trainer rank calls this, all return or all raise.

        Raises:
            WeightSyncError: on every rank, if any rank failed.
        """
        try:
            self._sync_by_best_route(weights, version, report)
        except WeightSyncError:  # the next sync is made as the first one was
            self._pull.forget()
            self._arrangements = None
            raise

    def _sync_by_best_route(
        self, weights: Iterable[NamedTensor], version: str | None, report: SyncReport
    ) -> None:
        """One session; a second one where the first was pulled and the pull did not hold."""
        ranks = RanksInStep(self._group)
        try:
            self._sync(weights, version, report, ranks, may_pull=True)
            return
        except WeightSyncError as error:
            if not self._is_pulled or isinstance(error, RankLost):
                raise
            recovery = self._pull.recover(ranks.cause, weights)
            if recovery is Recovery.RAISE:
                raise
            logger.warning("the sync is made again (%s): %s", recovery.value, error)
        report.restart()
        again, may_pull = RanksInStep(self._group), recovery is Recovery.PULL
        self._sync(weights, version, report, again, may_pull=may_pull)

    def check_reply(self, report: SyncReport) -> None:
        """Look at the reply to the last sync's request, where the sync had no need of it.

        To be called after the engine's next stage, when it has long come.

        Args:
            report: gets the seconds, in "reply".

        Raises:
            Exception: the reply is bad. One that was lost is only logged: the session has told that
                the weights are published, and the stage in between that the server lives.
        """
        request, self._unanswered = self._unanswered, None
        if request is not None:
            with report.stage("reply"):
                try:
                    request.result()
                except ReplyLost as error:
                    logger.warning("the weights were published, but the reply was lost: %s", error)

    def _sync(
        self,
        weights: Iterable[NamedTensor],
        version: str | None,
        report: SyncReport,
        ranks: RanksInStep,
        *,
        may_pull: bool,
    ) -> None:
        """One session."""
        self._is_pulled = False
        ranks.run_if_ok(lambda: self.check_reply(report))
        request = OpeningRequest(self._engine, version)
        with ExitStack() as stack:
            stack.callback(self._rest)
            session = ranks.run_if_ok(lambda: stack.enter_context(self._new_session()))
            with report.stage("open"):
                self._open(session, request, ranks)
            source, kind = self._choose(weights, report, may_pull=may_pull)
            has_arrived = session.has_arrived if session is not None else lambda: False
            ranks.run_always(lambda: source.start(has_arrived))
            with report.stage("open"):
                has_met = self._meet(session, request, ranks)
            loaded = None
            if has_met:
                source = self._after_joining(_joined(session), source, weights, report, ranks)
                loaded = self._transfer(_joined(session), source, report, ranks)
            source.drain()
            self._end(session, request, report, ranks)
            _joined(session).keep_socket()
        assert loaded is not None, "a rank that has not failed has loaded"
        self._prepare_faster_routes(weights, loaded, source, kind, report)

    def _choose(
        self, weights: Iterable[NamedTensor], report: SyncReport, *, may_pull: bool
    ) -> tuple[SyncSource, SyncKind]:
        """Where the buckets come from, the same on all ranks, and what the exchange does."""
        if may_pull:
            self._is_pulled = self._pull.prepare(weights)
        if self._is_pulled:
            pulled = PulledBuckets(self._pull, weights, self._stream, self._device, report)
            return pulled, SyncKind.FULL
        kind = SyncKind.FULL
        if self._exchange.is_prepared:
            with report.stage("confirm"):  # while the engine joins
                kind = self._exchange.choose_kind(weights, self._stream.cuts)
        if kind is not SyncKind.EXCHANGE:
            return self._exported(weights, report), kind
        arranged = ArrangedSync(self._arrangements)
        source = self._exchange.buckets(self._stream.cuts, arranged, self._ring, report)
        return source, kind

    def _exported(self, weights: Iterable[NamedTensor], report: SyncReport) -> ExportedBuckets:
        arranged = ArrangedSync(self._arrangements)
        return ExportedBuckets(Export(weights), self._stream, self._ring, arranged, report)

    def _after_joining(
        self,
        session: TrainerSession,
        source: SyncSource,
        weights: Iterable[NamedTensor],
        report: SyncReport,
        ranks: RanksInStep,
    ) -> SyncSource:
        """The source, now that all engines have said how buckets may come."""
        held = session.arrangements
        if isinstance(source, ExchangedBuckets):
            if ranks.agree(is_ready=self._exchange.holds(held)):
                source.engine_joined(held)
                return source
            warn_once("a sync is exported: an engine reads other bytes than were prepared for it")
            source = self._exported(weights, report)
        ranks.run_if_ok(lambda: source.engine_joined(held))
        return source

    def _transfer(
        self,
        session: TrainerSession,
        source: SyncSource,
        report: SyncReport,
        ranks: RanksInStep,
    ) -> Loaded | None:
        """Have every bucket loaded and, when all ranks have come so far, published."""
        ranks.run_if_ok(lambda: self._send(session, source, report, ranks))
        ranks.run_if_ok(source.confirm)
        source.drain()
        loaded = ranks.run_if_ok(lambda: self._finish(session, source, report, ranks))
        if ranks.agree():
            ranks.run_if_ok(lambda: self._commit(session, loaded, report, ranks))
        return loaded

    def _end(
        self,
        session: TrainerSession | None,
        request: OpeningRequest,
        report: SyncReport,
        ranks: RanksInStep,
    ) -> None:
        """All ranks leave together.

        Raises:
            WeightSyncError: on every rank, if any rank failed.
        """
        if ranks.error is None:
            with report.stage("reply"):
                self._end_in_step(request, ranks)
        if ranks.error is not None:
            if session is not None:
                session.abort(ranks.error, request.check_answer if request.may_have_left else None)
            request.give_up(min(GIVE_UP_S, self._settings.request_timeout_s))
            ranks.agree()  # nobody leaves while an engine is still busy
        ranks.raise_error()

    def _prepare_faster_routes(
        self,
        weights: Iterable[NamedTensor],
        loaded: Loaded,
        source: SyncSource,
        kind: SyncKind,
        report: SyncReport,
    ) -> None:
        """After a good sync: can the next ones do without the export?"""
        source.end()
        if not source.is_export:
            return
        if self._settings.read_in_place and sources_of(weights) is None:
            warn_once(
                f"{NOT_IN_PLACE}: the export does not name those that it hands on as they are "
                "(verl's does with FSDP2, without adapters and quantisation)"
            )
        cuts = self._stream.cuts
        if self._pull.can_learn(weights):
            with report.stage("learn"):
                if self._pull.learn(weights, cuts, may_read=loaded.may_read_in_place):
                    self._ring.free()
                    return
        if self._exchange.can_learn(weights):
            known = self._arrangements
            if known is not None and not known.fits(cut.bucket for cut in cuts):
                known = None
            # An engine that has replayed its plan has said what it reads, unless that is all.
            is_arrangement_final = known is not None or not report.num_eager
            with report.stage("learn"):
                self._exchange.learn(
                    weights, self._stream, known, kind, is_arrangement_final=is_arrangement_final
                )

    def _new_session(self) -> TrainerSession:
        return TrainerSession(self._sockets, self._settings, self._names)

    def _open(
        self, session: TrainerSession | None, request: OpeningRequest, ranks: RanksInStep
    ) -> None:
        """Gather the ranks' invitations and post them; all ranks join the gather."""
        gathered = self._group.gather(b"" if session is None else session.invitation)
        if gathered is not None and all(gathered):
            ranks.run_if_ok(lambda: request.post(gathered))

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
            if has_met or _joined(session).greet(request.check, wait_s=STEP_S):
                return True
            if time.monotonic() > deadline:
                raise SessionError(f"the engine did not join within {limit_s:g} s")
            return False

        while ranks.error is None:
            has_met = bool(ranks.run_if_ok(meet))
            if ranks.agree(is_ready=has_met):
                return True
        return False

    def _send(
        self, session: TrainerSession, source: SyncSource, report: SyncReport, ranks: RanksInStep
    ) -> None:
        """Send every bucket; the engine may still be at the last ones."""
        source.map_memory(session)
        for ready in source:
            index, bucket = ready.index, ready.bucket
            session.load(
                index,
                bucket,
                self._pieces(session, ready),
                read_only=ready.pieces is not None,
                arranged=ready.arranged,
            )
            ranks.sent(bucket)
            report.num_arranged += bool(ready.arranged)
            report.sent_bytes += ready.nbytes if ready.arranged else bucket.payload_bytes
            free = index + 1 - self._ring.num_buffers  # the next bucket takes this one's buffer
            if ready.storage is not None and free >= 0 and not bucket.is_last:
                with report.stage("load"):
                    session.wait_until_done(free)
        if not ranks.num_buckets:
            raise ValueError("the trainer exported no tensor")

    def _pieces(self, session: TrainerSession, ready: ReadyBucket) -> list[BucketPiece]:
        """Where the engine finds the bucket; a staging buffer that it does not know is mapped."""
        if ready.storage is None:
            return ready.pieces or []
        slot = session.map_buffer(ready.storage, keep=self._settings.keep_staging_buffers)
        return [BucketPiece(slot, 0, 0, ready.nbytes)]

    def _finish(
        self, session: TrainerSession, source: SyncSource, report: SyncReport, ranks: RanksInStep
    ) -> Loaded:
        """Have the engine rank read to the end; how it has loaded the buckets."""
        session.finish(
            num_buckets=ranks.num_buckets,
            num_tensors=ranks.num_tensors,
            arrangements=self._known_digest() if source.is_packed else None,
        )
        with report.stage("load"):
            session.wait_until_done(ranks.num_buckets - 1)
        with report.stage("commit"):
            return session.outcome()

    def _commit(
        self,
        session: TrainerSession,
        loaded: Loaded | None,
        report: SyncReport,
        ranks: RanksInStep,
    ) -> None:
        """Have the weights published; what this sync tells of the next ones."""
        assert loaded is not None, "the ranks have agreed that all is loaded"
        ranks.may_be_served = True
        session.commit()
        try:
            with report.stage("publish"):
                session.wait_until_published()
        except EngineFailed:  # its TP ranks have agreed to publish nothing
            ranks.may_be_served = False
            raise
        report.num_replayed, report.num_eager = loaded.num_replayed, loaded.num_eager
        report.eager_reason, report.engine_seconds = loaded.reason, loaded.seconds
        if loaded.arrangements is not None:
            self._learn(loaded.arrangements)

    def _end_in_step(self, request: OpeningRequest, ranks: RanksInStep) -> None:
        """Agree that every rank has ended well, and wait for the request's reply, unless a stage
        follows that looks at it: see `check_reply`.
        """
        defers_reply = self._settings.free_cache_engine
        has_ended = False
        while not has_ended and ranks.error is None:
            is_answered = defers_reply or request.wait(STEP_S)
            if is_answered and not defers_reply:
                ranks.run_if_ok(request.result)
            has_ended = ranks.agree(is_ready=is_answered)
        self._unanswered = request if has_ended and defers_reply else None

    def _known_digest(self) -> str | None:
        """Of the arrangements that this rank knows; None where it could not use any."""
        if not self._wants_arrangements or not self._stream.cuts:
            return None
        return self._arrangements.digest if self._arrangements is not None else ""

    def _learn(self, encoded: bytes) -> None:
        """From the next sync on, send what the engine rank reads."""
        sent = [cut.bucket for cut in self._stream.cuts]
        try:
            self._arrangements = KnownArrangements.of(encoded, sent)
        except WireError as error:
            self._wants_arrangements = False
            logger.warning(
                "buckets are sent whole, the engine's arrangements do not fit: %s", error
            )
            return
        self._ring.free()  # its buffers have room for whole buckets

    def _rest(self) -> None:
        self._exchange.free()
        if not self._settings.keep_staging_buffers:
            self._ring.free()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # what the engine has let go of


def _joined(session: TrainerSession | None) -> TrainerSession:
    assert session is not None, "a rank without a session has failed"
    return session
