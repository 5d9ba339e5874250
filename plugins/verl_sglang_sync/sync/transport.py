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
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from sglang_loader.common.session.messages import Loaded
from verl_sglang_sync.collective import RankLost, TrainerGroup, WeightSyncError
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.server_client import ReplyLost
from verl_sglang_sync.engine.session import SessionSockets, TrainerSession
from verl_sglang_sync.report import SyncReport, warn_once
from verl_sglang_sync.routes.arranged_sending import EngineArrangements
from verl_sglang_sync.routes.exchange.route import PIECES_PER_BUCKET, Exchange
from verl_sglang_sync.routes.export import ExportedBuckets
from verl_sglang_sync.routes.pull.route import Pull
from verl_sglang_sync.routes.route import Recovery, Route, SyncSource
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.sources.bucket_stream import BucketStream
from verl_sglang_sync.sources.export import Export, NamedTensor
from verl_sglang_sync.sources.memory_blocks import BlockNames
from verl_sglang_sync.sources.source_map import SourceMap
from verl_sglang_sync.sync.ranks_in_step import Engine, OpeningRequest, RanksInStep
from verl_sglang_sync.sync.session_run import SessionRun

logger = logging.getLogger(__name__)

OTHER_BYTES = "a sync is exported: an engine reads other bytes than were prepared for it"


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
        engine: Engine | None,
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
            group,
            device,
            source_map,
            self._stream,
            arrangements=self._arrangements,
            ring=self._ring,
            is_wanted=settings.exchange_shards,
            piece_nbytes=settings.bucket_bytes // PIECES_PER_BUCKET,
            recheck_every_n_syncs=settings.recheck_every_n_syncs,
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
        self._route, loaded = None, None
        defers_reply = self._settings.free_cache_engine
        ranks.run_if_ok(lambda: self.check_reply(report))
        request = OpeningRequest(self._engine, version)
        with ExitStack() as stack:
            stack.callback(self._rest)
            session = ranks.run_if_ok(lambda: stack.enter_context(self._new_session()))
            run = SessionRun(session, request, ranks, self._settings, report)
            with report.stage("open"):
                run.open(self._group)
            source = self._choose(weights, routes, report)
            ranks.run_always(lambda: source.start(run.has_arrived))
            with report.stage("open"):
                has_met = run.meet()
            if has_met:
                exported = partial(self._exported, weights, report)
                source = self._after_joining(run, source, exported)
                loaded = self._transfer(run, source)
            source.drain()
            run.end(defers_reply=defers_reply)
        assert loaded is not None, "a rank that has not failed has loaded"
        self._unanswered = request if defers_reply else None
        source.end()
        self._was_loaded(loaded, report)
        if isinstance(source, ExportedBuckets):
            self._learn_routes(weights, loaded, report)

    def _new_session(self) -> TrainerSession:
        return TrainerSession(self._sockets, self._settings, self._names)

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
        self, run: SessionRun, source: SyncSource, exported: Callable[[], SyncSource]
    ) -> SyncSource:
        """The source, now that all engines have said how buckets may come.

        All ranks go through the full export where an engine holds other arrangements than were
        prepared for it, or a rank has failed: it could take no part in anything else.
        """
        held, needed = run.session.arrangements, source.needs_arrangements
        if needed is not None and not run.ranks.agree(is_ready=held == needed):
            if run.ranks.error is None:
                warn_once(OTHER_BYTES)
            source, self._route = exported(), None
        run.ranks.run_if_ok(lambda: source.engine_joined(held))
        return source

    def _transfer(self, run: SessionRun, source: SyncSource) -> Loaded | None:
        """Have every bucket loaded and, when all ranks have come so far, published."""
        ranks = run.ranks
        ranks.run_if_ok(lambda: run.send(source, self._ring.num_buffers))
        ranks.run_if_ok(source.confirm)
        source.drain()
        buckets = self._stream.buckets
        known = self._arrangements.known_digest(buckets) if source.is_packed else None
        loaded = ranks.run_if_ok(lambda: run.finish(known))
        if ranks.agree():
            ranks.run_if_ok(run.commit)
        return loaded

    def _was_loaded(self, loaded: Loaded, report: SyncReport) -> None:
        """What a good sync tells of itself and of the next ones."""
        report.num_replayed, report.num_eager = loaded.num_replayed, loaded.num_eager
        report.eager_reason, report.engine_seconds = loaded.reason, loaded.seconds
        if loaded.arrangements is not None:
            self._arrangements.learn(loaded.arrangements, self._stream.buckets)
            self._ring.free()  # its buffers have room for whole buckets

    def _learn_routes(
        self, weights: Iterable[NamedTensor], loaded: Loaded, report: SyncReport
    ) -> None:
        """After a good sync by export: can the next ones do without it?"""
        for number, route in enumerate(self._routes, start=1):
            if route.can_learn(weights):
                with report.stage("learn"):
                    needs_no_staging = route.learn(weights, loaded)
                if needs_no_staging:
                    self._ring.free()
                    for worse in self._routes[number:]:
                        worse.forget()
                    return

    def _rest(self) -> None:
        for route in self._routes:
            route.rest()
        if not self._settings.keep_staging_buffers:
            self._ring.free()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # what the engine has let go of
