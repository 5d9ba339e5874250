"""One sync: requests open sessions with all engine ranks, buckets go straight to them.

A trainer rank has sessions with the engine ranks that it gives weights to (`engines`): one,
many, or none. Ranks are not in step within a sync; they agree three times: everyone has joined;
everyone has sent the same, and its engines have read it (only then is anything published); every
replica is done. A rank that fails in between goes on exporting (the export's collectives need it),
then all leave together with the same `WeightSyncError`.

Where the buckets come from is chosen once the requests have left (`_choose`): the first route that
has something to offer (`routes.route`), or verl's full export, packed. A route by which a sync
failed may ask for it to be made again, once: by the same route, or with the export.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import cache, partial

import torch

from sglang_loader.common.garbage_collection import no_full_collections
from sglang_loader.common.session.folder import SessionFolder
from sglang_loader.common.session.messages import Loaded
from verl_sglang_sync.collective import RankLost, TrainerGroup, WeightSyncError, world_size
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.engine_ranks import Engine, OpeningRequest, drop_frames
from verl_sglang_sync.engine.update_groups import Replica, UpdateGroups
from verl_sglang_sync.report import SyncReport, warn_once
from verl_sglang_sync.routes.exchange import Exchange
from verl_sglang_sync.routes.export import ExportedBuckets
from verl_sglang_sync.routes.pull.route import Pull
from verl_sglang_sync.routes.pull_and_send import PullAndSend
from verl_sglang_sync.routes.route import ExportedSync, Recovery, Route, RouteContext, SyncSource
from verl_sglang_sync.routes.shards.all_to_all import NUM_TRAVELLING
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.sources.export import Export, NamedTensor
from verl_sglang_sync.sync.engines import ColocatedEngine, RemoteEngines, SyncTask
from verl_sglang_sync.sync.ranks_in_step import RanksInStep
from verl_sglang_sync.sync.session_run import SessionRun

logger = logging.getLogger(__name__)

NO_ARRANGEMENTS = (
    "a sync is exported: an engine has no load plan for the parts of buckets that it was to be sent"
)


class SessionTransport:
    """Carries syncs; lives in every trainer process, for all its syncs.

    Args:
        routes: how a sync is spared the full export, the best first.
        ring: the staging buffers; None on a rank that sends no exported bucket.
    """

    def __init__(
        self,
        context: RouteContext,
        *,
        engines: ColocatedEngine | RemoteEngines,
        routes: Sequence[Route],
        ring: StagingRing | None,
    ) -> None:
        # By the other strategy memory moves when it is shared by name.
        if context.device.type == "cpu":
            torch.multiprocessing.set_sharing_strategy("file_system")
        self._engines = engines
        self._routes = routes
        self._route: Route | None = None  # of this sync; None: its buckets are exported
        self._group = context.group
        self._settings = context.settings
        self._device = context.device
        self._stream = context.stream
        self._source_map = context.source_map
        self._ring = ring
        # The staging buffers are freed after each sync, for the KV cache.
        self._frees_ring = context.is_colocated and not self._settings.keep_staging_buffers
        # A stage of the engine follows each sync: `check_reply` is called after it.
        self._defers_reply = context.is_colocated and self._settings.free_cache_engine
        self._unanswered: list[OpeningRequest] = []
        self._needs_staging = False  # an exported sync has proven no route without

    async def sync(
        self,
        weights: Iterable[NamedTensor],
        *,
        version: str | None,
        report: SyncReport,
        replicas: Sequence[Replica] = (),
    ) -> None:
        """Send all of `weights`; every trainer rank calls this, all return or all raise.

        Args:
            version: becomes the engines' weight version.
            replicas: of this sync, in disaggregated mode; only the first rank's count.

        Raises:
            WeightSyncError: on every rank, if any rank failed.
        """
        task = SyncTask(weights=weights, version=version, report=report, replicas=replicas)
        try:
            with no_full_collections():
                self._sync_by_best_route(task)
        except WeightSyncError as error:  # the next sync is made as the first one was
            for route in self._routes:
                route.forget()
            for reader in self._engines.readers:
                reader.forget()
            drop_frames(error)  # its text has those that matter
            raise

    def _sync_by_best_route(self, task: SyncTask) -> None:
        """One session; a second one where the route of the first did not hold and says so."""
        ranks, routes = RanksInStep(self._group), self._routes
        try:
            self._sync(task, ranks, routes)
            return
        except WeightSyncError as error:
            if self._route is None or isinstance(error, RankLost):
                raise
            recovery = self._route.recover(ranks.cause, task.weights)
            if recovery is Recovery.RAISE:
                raise
            logger.warning("the sync is made again (%s): %s", recovery.value, error)
            routes = (self._route,) if recovery is Recovery.AGAIN else ()
        task.report.restart()
        self._sync(task, RanksInStep(self._group), routes)

    def check_reply(self, report: SyncReport) -> None:
        """Raise a bad reply to the last sync's requests; called after the engine's next stage."""
        requests, self._unanswered = self._unanswered, []
        for request in requests:
            with report.stage("reply"):
                request.result()

    def _sync(self, task: SyncTask, ranks: RanksInStep, routes: Sequence[Route]) -> None:
        self._route, loaded = None, None
        report = task.report
        ranks.run_if_ok(lambda: self.check_reply(report))
        with ExitStack() as stack:
            stack.push(self._end_session)
            with report.stage("open"):
                opened = self._engines.open(stack, ranks, task)
            run = SessionRun(*opened, ranks, self._settings, report)
            source = self._choose(task, routes)
            ranks.run_always(source.start)
            with report.stage("open"):
                has_met = run.meet()
            if has_met:
                source = self._after_joining(run, source, task)
                loaded = self._transfer(run, source, task)
            source.drain()
            run.end(defers_reply=self._defers_reply)
        assert loaded is not None, "a rank that has not failed has loaded"
        self._unanswered = run.requests if self._defers_reply else []
        source.end()
        self._record_loaded(run, loaded, report)
        if isinstance(source, ExportedBuckets):
            routes = self._routes if source.asks_for_arrangements else self._routes[:1]
            exported = ExportedSync(task.weights, loaded, source.comparison)
            self._learn_routes(routes, exported, report)

    def _choose(self, task: SyncTask, routes: Sequence[Route]) -> SyncSource:
        for route in routes:
            source = route.choose(task.weights, task.report)
            if source is not None:
                self._route = route
                return source
        return self._exported(task)

    def _exported(self, task: SyncTask, *, is_compared: bool = True) -> ExportedBuckets:
        weights, report, comparison = task.weights, task.report, None
        # The answer takes an engine a second, and is of no use where it reads the parameters in
        # place from the next sync on.
        asks = self._needs_staging or not self._routes[0].can_learn(weights)
        if is_compared and any(route.wants_comparison(weights) for route in self._routes):
            with report.stage("learn"):
                comparison = self._source_map.begin_comparison(weights)
        return ExportedBuckets(
            Export(weights),
            self._stream,
            self._ring,
            report,
            asks_for_arrangements=asks,
            comparison=comparison,
        )

    def _after_joining(self, run: SessionRun, source: SyncSource, task: SyncTask) -> SyncSource:
        """The source, now that all engines have said how buckets may come.

        All ranks go through the full export where an engine holds other arrangements than were
        prepared for it, or a rank has failed: it could take no part in anything else.
        """
        needed = source.required_arrangements
        if needed is not None and not run.ranks.agree(is_ready=run.engines_hold(needed)):
            if run.ranks.error is None:
                warn_once(NO_ARRANGEMENTS)
            assert self._route is not None, "an export needs no arrangements"
            self._route.is_proven = False  # the engine may recheck its plan: so does the route
            source = self._exported(task, is_compared=run.ranks.error is None)
            self._route = None
        return source

    def _transfer(self, run: SessionRun, source: SyncSource, task: SyncTask) -> list[Loaded] | None:
        """Have every bucket loaded and, when all ranks have come so far, published."""
        ranks = run.ranks

        def prepare_to_learn() -> None:
            for route in self._routes if isinstance(source, ExportedBuckets) else ():
                if route.can_learn(task.weights):
                    with task.report.stage("learn"):
                        route.prepare_to_learn(task.weights)

        ranks.run_if_ok(lambda: run.send(source))
        ranks.run_if_ok(source.confirm)
        source.drain()
        loaded = ranks.run_if_ok(lambda: run.finish(source, prepare_to_learn))
        if ranks.error is None and ranks.agree():
            ranks.run_if_ok(run.commit)
        return loaded

    def _record_loaded(self, run: SessionRun, loaded: Sequence[Loaded], report: SyncReport) -> None:
        if loaded:
            least = min(loaded, key=lambda outcome: outcome.num_replayed)
            report.num_replayed, report.num_eager = least.num_replayed, least.num_eager
            report.eager_reason, report.engine_seconds = least.reason, least.seconds
        for engine, outcome in zip(run.engines, loaded, strict=True):
            if outcome.arrangements is not None:
                engine.arrangements.learn(outcome.arrangements, self._stream.buckets)

    def _learn_routes(
        self, routes: Sequence[Route], sync: ExportedSync, report: SyncReport
    ) -> None:
        """After a good sync by export: can the next ones do without it?"""
        for number, route in enumerate(routes, start=1):
            if route.can_learn(sync.weights):
                with report.stage("learn"):
                    needs_no_staging = route.learn(sync)
                if route.is_proven:
                    self._free_ring()  # whole buckets needed more room than it does
                if needs_no_staging:
                    for worse in self._routes[number:]:
                        worse.forget()
                    return
        self._needs_staging = True

    def _end_session(self, _: object, error: object, __: object) -> None:
        if error is not None:
            self._engines.abandon()
        for route in self._routes:
            route.free_scratch()
        if self._frees_ring:
            self._free_ring()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # what the engine has let go of

    def _free_ring(self) -> None:
        if self._ring is not None:
            self._ring.free()


def colocated_transport(
    *, engine: Engine | None, settings: WeightSyncConfig, group: TrainerGroup, device: torch.device
) -> SessionTransport:
    """Carries the syncs of one replica, on the trainer ranks' devices: `SGLangShardingManager`."""
    num_buffers = settings.num_staging_buffers
    ring = StagingRing(device, num_buffers=num_buffers, bucket_bytes=settings.bucket_bytes)
    engines = ColocatedEngine(engine, group, settings)
    context = RouteContext(group, device, settings, lambda: engines.readers)
    pull = Pull(context, lambda handle: engines.sockets.folder.record(handle))
    return SessionTransport(
        context, engines=engines, routes=(pull, Exchange(context, ring)), ring=ring
    )


def disaggregated_transport(
    *, address: str | None, settings: WeightSyncConfig, group: TrainerGroup, device: torch.device
) -> SessionTransport:
    """Carries syncs to replicas on devices of their own.

    Args:
        address: of the host of the trainer's first rank, as the replicas reach it; None on the
            other ranks, which do not broadcast.
        device: of the staging buffers and of the update groups.
    """
    settings = settings.for_session()
    limit_s = settings.timeouts_s.get("group", settings.request_timeout_s)
    make_groups = partial(UpdateGroups, address=address or "", device=device, timeout_s=limit_s)
    groups: UpdateGroups | None = None
    ring: StagingRing | None = None
    if address is not None:
        groups = make_groups()
        ring = StagingRing(device, num_buffers=NUM_TRAVELLING, bucket_bytes=settings.bucket_bytes)
    senders = make_groups(trainers=group)
    engines = RemoteEngines(groups, senders, lambda: send.is_proven, settings)
    context = RouteContext(group, device, settings, lambda: engines.readers, world_size())
    folder = cache(SessionFolder)  # made when there is memory that engines map, which it lists
    pull, near = (Pull(context, lambda handle: folder().record(handle)) for _ in range(2))
    send = PullAndSend(context, near, lambda: engines.sending_group)
    return SessionTransport(context, engines=engines, routes=(pull, send), ring=ring)
