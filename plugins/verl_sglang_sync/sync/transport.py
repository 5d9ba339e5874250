"""One sync: a request opens a session on all ranks, buckets go straight to the engine.

Every trainer rank has a session of its own with the engine rank on its device, so ranks are not in
step within a sync; they agree three times: everyone has joined; everyone has sent the same, and its
engine has read it (only then is anything published); every replica is done. A rank that fails in
between goes on exporting (the export's collectives need it), then all leave together with the same
`WeightSyncError`.

Where the buckets come from is chosen once the request has left (`_choose`): the first route that
has something to offer (`routes.route`), or verl's full export, packed. A route by which a sync
failed may ask for it to be made again, once: by the same route, or with the export.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch

from sglang_loader.common.session.messages import BucketPiece, Loaded, SessionError
from verl_sglang_sync.collective import STEP_S, RankLost, TrainerGroup, WeightSyncError
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.server_client import ReplyLost
from verl_sglang_sync.engine.session import EngineFailed, SessionSockets, TrainerSession
from verl_sglang_sync.report import SyncReport, warn_once
from verl_sglang_sync.routes.arranged_sending import EngineArrangements
from verl_sglang_sync.routes.exchange.route import Exchange
from verl_sglang_sync.routes.export import ExportedBuckets
from verl_sglang_sync.routes.pull.route import Pull
from verl_sglang_sync.routes.route import ReadyBucket, Recovery, Route, SyncSource
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.sources.bucket_stream import BucketStream
from verl_sglang_sync.sources.export import Export, NamedTensor
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
        self._arrangements = EngineArrangements(is_wanted=settings.uses_plan)
        source_map = SourceMap(group, device)
        pull = Pull(
            group,
            device,
            source_map,
            self._stream,
            is_wanted=settings.read_in_place,
            record=lambda handle: self._sockets.folder.record(handle),
            recheck_every_n_syncs=settings.recheck_every_n_syncs,
        )
        exchange = Exchange(
            settings,
            group,
            device,
            source_map,
            stream=self._stream,
            arrangements=self._arrangements,
            ring=self._ring,
        )
        self._routes: tuple[Route, ...] = (pull, exchange)  # the best first
        self._route: Route | None = None  # of this sync; None: its buckets are exported
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
            for route in self._routes:
                route.forget()
            self._arrangements.forget()
            raise

    def _sync_by_best_route(
        self, weights: Iterable[NamedTensor], version: str | None, report: SyncReport
    ) -> None:
        """One session; a second one where the route of the first did not hold and says so."""
        ranks, routes = RanksInStep(self._group), self._routes
        try:
            self._sync(weights, version, report, ranks, routes)
            return
        except WeightSyncError as error:
            if self._route is None or isinstance(error, RankLost):
                raise
            recovery = self._route.recover(ranks.cause, weights)
            if recovery is Recovery.RAISE:
                raise
            logger.warning("the sync is made again (%s): %s", recovery.value, error)
            routes = (self._route,) if recovery is Recovery.AGAIN else ()
        report.restart()
        self._sync(weights, version, report, RanksInStep(self._group), routes)

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
        routes: Sequence[Route],
    ) -> None:
        """One session, by one of the routes or with the export."""
        self._route = None
        ranks.run_if_ok(lambda: self.check_reply(report))
        request = OpeningRequest(self._engine, version)
        with ExitStack() as stack:
            stack.callback(self._rest)
            session = ranks.run_if_ok(lambda: stack.enter_context(self._new_session()))
            with report.stage("open"):
                self._open(session, request, ranks)
            source = self._choose(weights, routes, report)
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
        source.end()
        if isinstance(source, ExportedBuckets):
            self._learn_routes(weights, loaded, report)

    def _choose(
        self, weights: Iterable[NamedTensor], routes: Sequence[Route], report: SyncReport
    ) -> SyncSource:
        """Where the buckets come from, the same on all ranks."""
        for route in routes:
            source = route.choose(weights, report)
            if source is not None:
                self._route = route
                return source
        return self._exported(weights, report)

    def _exported(self, weights: Iterable[NamedTensor], report: SyncReport) -> ExportedBuckets:
        arranged = self._arrangements.for_sync()
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
        held, needed = session.arrangements, source.needs_arrangements
        if needed is not None and not ranks.agree(is_ready=held == needed):
            warn_once("a sync is exported: an engine reads other bytes than were prepared for it")
            source, self._route = self._exported(weights, report), None
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

    def _learn_routes(
        self, weights: Iterable[NamedTensor], loaded: Loaded, report: SyncReport
    ) -> None:
        """After a good sync by export: can the next ones do without it?"""
        for route in self._routes:
            if route.can_learn(weights):
                with report.stage("learn"):
                    needs_no_staging = route.learn(weights, loaded)
                if needs_no_staging:
                    self._ring.free()
                    return

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
        sent = [cut.bucket for cut in self._stream.cuts]
        session.finish(
            num_buckets=ranks.num_buckets,
            num_tensors=ranks.num_tensors,
            arrangements=self._arrangements.known_digest(sent) if source.is_packed else None,
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
            self._arrangements.learn(loaded.arrangements, [c.bucket for c in self._stream.cuts])
            self._ring.free()  # its buffers have room for whole buckets

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

    def _rest(self) -> None:
        for route in self._routes:
            route.rest()
        if not self._settings.keep_staging_buffers:
            self._ring.free()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # what the engine has let go of


def _joined(session: TrainerSession | None) -> TrainerSession:
    assert session is not None, "a rank without a session has failed"
    return session
