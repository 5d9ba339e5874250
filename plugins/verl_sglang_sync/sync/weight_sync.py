"""One sync: requests open sessions with all engine ranks, buckets go straight to them.

A trainer rank has sessions with the engine ranks that it gives weights to (`engines`): one, many,
or none. A sync is a few sessions with each, one after the other:

    _attempt      new weights, by a route that is proven, or by verl's full export; if that fails
                  before anything was published, once more, by the export
    _prove_route  after an export from which a route has learnt: the same weights by that route;
                  the engines refuse other bytes than they hold, and the export is made again
    _prove_served when a proof is due, or a user has asked an engine for one: the same weights by
                  the export, through `load_weights`; the engines compare them with what they held

`_once` is one session. Ranks are not in step within it; they agree three times: everyone has
joined; everyone has sent the same, and its engines have read it (only then is anything published);
every replica is done. A rank that fails in between goes on exporting (the export's collectives need
it), then all leave together with the same `WeightSyncError`. What fails anywhere else on one rank
makes it leave, so that no other rank waits for it (`TrainerGroup.leave`).
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain

import torch

from sglang_loader.common.garbage_collection import no_full_collections
from sglang_loader.common.naming import listed
from sglang_loader.common.session.folder import SessionFolder
from sglang_loader.common.session.messages import Loaded, PeerLost, Proof
from verl_sglang_sync.collective import (
    RankLost,
    Reason,
    ReplicasDiffer,
    TrainerGroup,
    WeightSyncError,
    holds_everywhere,
    world_size,
)
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.engine_ranks import Engine, OpeningRequest, drop_frames
from verl_sglang_sync.engine.server_client.errors import ReplyLost, ServerUnreachable
from verl_sglang_sync.engine.session import EngineCannotMap, Misfit, ProofFailed
from verl_sglang_sync.engine.update_groups import Replica, UpdateGroups
from verl_sglang_sync.report import SyncReport, warn_once
from verl_sglang_sync.routes.exchange import Exchange
from verl_sglang_sync.routes.export import ExportedBuckets
from verl_sglang_sync.routes.pull.route import Pull
from verl_sglang_sync.routes.pull_and_send import PullAndSend
from verl_sglang_sync.routes.route import (
    ExportedSync,
    Recovery,
    Route,
    RouteContext,
    RouteState,
    SyncSource,
)
from verl_sglang_sync.routes.shards.all_to_all import NUM_TRAVELLING
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.sources.export import Export, NamedTensor, is_repeatable
from verl_sglang_sync.sync.engines import ColocatedEngine, RemoteEngines, SyncTask
from verl_sglang_sync.sync.ranks_in_step import RanksInStep
from verl_sglang_sync.sync.sessions import Sessions

logger = logging.getLogger(__name__)

PROOF_FACTOR = 8
"""Syncs to the next proof, and from each to the one after it, where tensors hold the same bytes."""


CANNOT_PROVE = (
    "weight sync: a proof is due and is left out, so that nothing is compared: this trainer's "
    "export cannot be made a second time in one sync, which a proof needs"
)


class FallbackRefused(RuntimeError):
    """The next syncs would be exported in full, and `on_fallback=error` forbids that."""


HOPELESS = PeerLost | Misfit | FallbackRefused | ServerUnreachable | ReplyLost
"""Errors of a sync that would come again if it were made again."""


@dataclass(frozen=True)
class Outcome:
    """What one session has done, equal on all ranks.

    Attributes:
        route: brought the weights; None: the export did.
        differing: tensors that engines held with other bytes than an export that proves has.
        num_alike: storages of all engine ranks that hold the same bytes as another, in a proof.
        wants_proof: an engine's user has asked for a proof of this sync, which can be made.
    """

    route: Route | None
    differing: list[str] = field(default_factory=list)
    num_alike: int = 0
    wants_proof: bool = False


class WeightSync:
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
        self._group = context.group
        self._settings = context.settings
        self._device = context.device
        self._stream = context.stream
        self._source_map = context.source_map
        self._ring = ring
        # The staging buffers are freed after each sync, for the KV cache.
        self._frees_ring = context.is_colocated
        # A stage of the engine follows each sync: `check_reply` is called after it.
        self._defers_reply = context.is_colocated and self._settings.free_cache_engine
        self._unanswered: list[OpeningRequest] = []
        self._needs_staging = False  # an exported sync has prepared no route without
        self._num_syncs = 0  # that were good
        self._next_proof: int | None = None  # number of the sync that is to be proven
        self._proof_distance = 1

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
        self._group.begin()
        try:
            with no_full_collections():
                self._sync(task)
        except WeightSyncError as error:  # the next sync is made as the first one was
            self._forget()
            drop_frames(error)  # its text has those that matter
            raise
        except BaseException as error:  # of this rank alone
            self._forget()
            self._group.leave(f"{type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise
            raise WeightSyncError(f"weight sync failed: {traceback.format_exc()}") from None

    def _sync(self, task: SyncTask) -> None:
        """Bring new weights, and prove what is not proven yet."""
        number = self._num_syncs + 1
        every = self._settings.prove_every_n_syncs
        is_due = number == self._next_proof or (every > 0 and number % every == 0)
        retried = [route.begin_sync() for route in self._routes]
        # A worse way, though proven, waits for a better one that is tried again.
        routes = self._routes[: retried.index(True)] if any(retried) else self._routes
        if is_due and not holds_everywhere(self._group, is_repeatable(task.weights)):
            warn_once(CANNOT_PROVE)
            is_due = False
        outcome = self._attempt(task, routes, proof_follows=is_due)
        is_due, is_proven = is_due or outcome.wants_proof, False
        while outcome.route is None and (learnt := self._learnt_route()) is not None:
            if is_proven := self._prove_route(task, learnt):
                break
            task.report.restart()
            outcome = self._attempt(task, (), proof_follows=is_due)
            is_due = is_due or outcome.wants_proof
        if is_due and not is_proven:
            self._prove_served(task)
        if outcome.route is not None:
            outcome.route.note_used()
        self._num_syncs = number

    def _attempt(self, task: SyncTask, routes: Sequence[Route], *, proof_follows: bool) -> Outcome:
        """Bring new weights, by the first of the routes that has them, or by the export. A failure
        before anything was published costs a second attempt.
        """
        can_prove = is_repeatable(task.weights)
        ranks, taken = RanksInStep(self._group, can_prove=can_prove), list[Route]()
        try:
            return self._once(task, ranks, routes, taken, proof_follows=proof_follows)
        except (RankLost, ReplicasDiffer):
            raise
        except WeightSyncError as error:
            if not self._may_repeat(task, ranks):
                raise
            drop_frames(error)  # they hold the groups and buffers of this attempt
            recovery = Recovery.EXPORT
            for route in taken:
                recovery = route.recover(ranks.cause, task.weights)
            logger.warning(
                "weight sync: nothing was published, so the sync is made again %s, which costs "
                "the seconds of another sync: %s",
                recovery.value,
                error,
            )
        task.report.restart()
        again = taken if recovery is Recovery.AGAIN else ()
        ranks = RanksInStep(self._group, can_prove=can_prove)
        return self._once(task, ranks, again, [], proof_follows=proof_follows)

    def _may_repeat(self, task: SyncTask, ranks: RanksInStep) -> bool:
        """True if a failed sync can be made again, and may succeed then; collective."""
        is_hopeless = isinstance(ranks.cause, HOPELESS)
        may_repeat = is_repeatable(task.weights) and not ranks.may_be_served and not is_hopeless
        return holds_everywhere(self._group, may_repeat)

    def _learnt_route(self) -> Route | None:
        return next((each for each in self._routes if each.state is RouteState.LEARNT), None)

    def _prove_route(self, task: SyncTask, route: Route) -> bool:
        """Send the weights that an export has just brought by the route that has learnt from it.

        Returns:
            False if the engines got other bytes, or none: their weights are incomplete now.
        """
        ranks = RanksInStep(self._group)
        try:
            with task.report.stage("prove"):
                outcome = self._once(_without_report(task), ranks, (route,), [], proof="route")
        except RankLost:
            raise
        except WeightSyncError as error:
            kinds = HOPELESS, ProofFailed, EngineCannotMap
            causes = self._group.all_gather([isinstance(ranks.cause, kind) for kind in kinds])
            is_hopeless, differs, cannot_map = map(any, zip(*causes, strict=True))
            if is_hopeless:
                raise
            reason = Reason(f"its proof failed: {error}", is_final=differs)
            route.refuse_unproven(reason, cannot_map=cannot_map)
            return False
        if outcome.route is None:  # the route had nothing to offer, and the export proved itself
            return True
        route.note_proven()
        task.report.is_proven = True
        self._plan_proof(outcome.num_alike)
        return True

    def _prove_served(self, task: SyncTask) -> None:
        """Send the weights by the export, through `load_weights`, and compare: do the engines serve
        what the trainer has? If not, they do now, and no fast way is taken any more.
        """
        with task.report.stage("prove"):
            for route in self._routes:
                route.check_replicas(task.weights)
            outcome = self._attempt_proof(task)
        if outcome is None:  # the next sync is due
            self._next_proof = self._num_syncs + 2
            return
        task.report.is_proven = not outcome.differing
        is_early = self._next_proof is not None and self._num_syncs + 1 < self._next_proof
        # A proof that is asked for does not put off one that alike tensors need.
        if not (is_early and outcome.num_alike):
            self._plan_proof(outcome.num_alike)
        if not outcome.differing:
            logger.info("weight sync: proven: the engines serve the trainer's weights bit for bit")
            return
        text = (
            f"a proof found {len(outcome.differing)} tensors that were not served as the trainer "
            f"has them: {listed(outcome.differing)}"
        )
        for route in self._routes:
            route.refuse(Reason(text, is_final=True))
        logger.error("weight sync: %s. The engines have the right weights now, by export.", text)

    def _attempt_proof(self, task: SyncTask) -> Outcome | None:
        """One session for `_prove_served`. If that fails, make a second one, without a proof, and
        return None.
        """
        ranks = RanksInStep(self._group)
        try:
            return self._once(_without_report(task), ranks, (), [], proof="served")
        except RankLost:
            raise
        except WeightSyncError as error:
            if not self._may_repeat(task, ranks):
                raise
            logger.warning("weight sync: not proven, exported in full again: %s", error)
        # Routes learn nothing: no session of this sync follows that could prove them.
        ranks = RanksInStep(self._group)
        self._once(_without_report(task), ranks, (), [], learns=False)
        return None

    def _plan_proof(self, num_alike: int) -> None:
        """After a proof: prove again later if tensors that held the same bytes may have been
        confused with each other, which shows only once they have parted.
        """
        self._next_proof = None
        if num_alike and any(route.is_prepared for route in self._routes):
            self._next_proof = self._num_syncs + 1 + self._proof_distance
            self._proof_distance *= PROOF_FACTOR

    def _forget(self) -> None:
        for route in self._routes:
            route.forget()
        for reader in self._engines.readers:
            reader.forget()

    def check_reply(self, report: SyncReport) -> None:
        """Raise a bad reply to the last sync's requests; called after the engine's next stage."""
        requests, self._unanswered = self._unanswered, []
        for request in requests:
            with report.stage("reply"):
                request.result()

    def _once(
        self,
        task: SyncTask,
        ranks: RanksInStep,
        routes: Sequence[Route],
        taken: list[Route],
        *,
        proof: Proof = "none",
        proof_follows: bool = False,
        learns: bool = True,
    ) -> Outcome:
        """One session with each engine rank, from the request that opens it to its reply.

        Args:
            ranks: keeps what fails on this rank, and the error that all ranks raise.
            routes: the first that has something to offer is taken, else the export.
            taken: gets the route that was taken, if any.
            proof: what the session proves.
            proof_follows: another session of this sync proves what this one brings.
            learns: routes may learn from an export.

        Raises:
            WeightSyncError: on every rank, if any rank failed.
        """
        report = task.report
        ranks.run_if_ok(lambda: self.check_reply(report))
        with ExitStack() as stack:
            stack.push(self._end_session)
            with report.stage("open"):
                opened = self._engines.open(stack, ranks, task, proof)
            run = Sessions(*opened, ranks, self._settings, report)
            learns = learns and proof == "none"
            source = self._choose(task, routes, taken, proof, learns)
            is_exported = isinstance(source, ExportedBuckets)
            try:
                ranks.run_always(source.start)
                with report.stage("open"):
                    run.meet()
                if ranks.asks_for_proof and proof == "none" and not is_repeatable(task.weights):
                    warn_once(CANNOT_PROVE)
                if not is_exported:
                    ranks.run_if_ok(lambda: run.check_plans(source, proves=proof == "route"))
                    if source.is_collective and ranks.error is None:
                        ranks.agree()  # before any rank waits for another one's bytes
                ranks.run_if_ok(lambda: run.send(source))
                ranks.run_if_ok(source.confirm)
            except RankLost:
                raise
            except BaseException:  # an interrupt: the other ranks need this one's export
                with suppress(Exception):
                    source.drain()
                raise
            source.drain()
            learns = learns and is_exported
            meanwhile = partial(self._prepare_to_learn, task, learns)
            ranks.run_if_ok(lambda: run.finish(source, meanwhile))
            loaded = run.wait_until_loaded() or []
            if ranks.error is None:
                ranks.run_if_ok(lambda: self._record_loaded(run, loaded, report))
                if learns:
                    assert isinstance(source, ExportedBuckets)
                    self._learn(task, source, loaded)
                    ranks.run_if_ok(self._check_fallback)
                follows = proof_follows or (learns and self._learnt_route() is not None)
                follows = follows or ranks.wants_proof
                ranks.run_if_ok(lambda: run.commit(is_last=not follows))
                ranks.run_if_ok(source.end)
            run.end(defers_reply=self._defers_reply)
        self._unanswered = run.requests if self._defers_reply else []
        if is_exported:
            for each in self._routes:
                each.note_unmapped()
        if proof == "route":
            for engine in run.engines:
                engine.arrangements.proven_plan = engine.session.plan
        route = taken[0] if taken else None
        if proof == "none":
            return Outcome(route, wants_proof=ranks.wants_proof)
        return self._compared(route, loaded)

    def _choose(
        self,
        task: SyncTask,
        routes: Sequence[Route],
        taken: list[Route],
        proof: Proof,
        learns: bool,
    ) -> SyncSource:
        """What the first route offers that has this sync's weights, else the export; collective."""
        for route in routes:
            source = route.choose(task.weights, task.report, proves=proof == "route")
            if source is not None:
                taken.append(route)
                return source
        weights, report, comparison = task.weights, task.report, None
        # The answer takes an engine a second, and is of no use where it reads the parameters in
        # place from the next sync on.
        asks = self._needs_staging or not self._routes[0].can_learn(weights)
        if learns and any(route.wants_comparison(weights) for route in self._routes):
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

    def _prepare_to_learn(self, task: SyncTask, learns: bool) -> None:
        for route in self._routes if learns else ():
            if route.can_learn(task.weights):
                with task.report.stage("learn"):
                    route.prepare_to_learn(task.weights)

    def _compared(self, route: Route | None, loaded: Sequence[Loaded]) -> Outcome:
        """What the proof found on all engine ranks; collective."""
        own = [(each.differing, each.num_alike) for each in loaded]
        found = list(chain.from_iterable(self._group.all_gather(own)))
        differing = dict.fromkeys(name for names, _ in found for name in names)
        return Outcome(route, list(differing), sum(num for _, num in found))

    def _record_loaded(self, run: Sessions, loaded: Sequence[Loaded], report: SyncReport) -> None:
        if loaded:
            least = min(loaded, key=lambda outcome: outcome.num_replayed)
            report.num_replayed, report.num_eager = least.num_replayed, least.num_eager
            report.eager_reason, report.engine_seconds = least.reason, least.seconds
        for engine, outcome in zip(run.engines, loaded, strict=True):
            if outcome.arrangements is not None:
                engine.arrangements.learn(outcome.arrangements, self._stream.buckets)

    def _learn(self, task: SyncTask, source: ExportedBuckets, loaded: Sequence[Loaded]) -> None:
        """After an export that is loaded: can the next syncs do without it? Collective."""
        routes = self._routes if source.asks_for_arrangements else self._routes[:1]
        exported = ExportedSync(task.weights, loaded, source.comparison)
        for number, route in enumerate(routes, start=1):
            if route.can_learn(task.weights):
                with task.report.stage("learn"):
                    needs_no_staging = route.learn(exported)
                if needs_no_staging:
                    for worse in self._routes[number:]:
                        worse.forget()
                    return
        self._needs_staging = True

    def _check_fallback(self) -> None:
        """Raise FallbackRefused if no route was prepared, and the user would rather stop."""
        settings = self._settings
        is_wanted = settings.read_in_place or settings.exchange_shards
        if settings.on_fallback != "error" or not is_wanted or self._learnt_route() is not None:
            return
        reasons = [f"{each.not_taken}: {each.reason}" for each in self._routes if each.reason]
        if not reasons:
            return  # another sync can prepare a route
        raise FallbackRefused(
            "on_fallback=error, and the next syncs would be exported in full: "
            f"{'; '.join(reasons)}. Set on_fallback=warn to go on slower"
        )

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


def _without_report(task: SyncTask) -> SyncTask:
    """The task of a session that proves: what it counts is not what the sync has cost."""
    report = SyncReport(mode=task.report.mode, replica=task.report.replica)
    return replace(task, report=report)


def colocated_sync(
    *, engine: Engine | None, settings: WeightSyncConfig, group: TrainerGroup, device: torch.device
) -> WeightSync:
    """Carries the syncs of one replica, on the trainer ranks' devices: `SGLangShardingManager`."""
    num_buffers = settings.num_staging_buffers
    ring = StagingRing(device, num_buffers=num_buffers, bucket_bytes=settings.bucket_bytes)
    engines = ColocatedEngine(engine, group, settings)
    context = RouteContext(group, device, settings, lambda: engines.readers)
    pull = Pull(context, lambda handle: engines.sockets.folder.record(handle))
    return WeightSync(context, engines=engines, routes=(pull, Exchange(context, ring)), ring=ring)


def disaggregated_sync(
    *, address: str | None, settings: WeightSyncConfig, group: TrainerGroup, device: torch.device
) -> WeightSync:
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
    engines = RemoteEngines(groups, senders, lambda: send.is_prepared, settings)
    context = RouteContext(group, device, settings, lambda: engines.readers, world_size())
    folder = cache(SessionFolder)  # made when there is memory that engines map, which it lists
    pull, near = (Pull(context, lambda handle: folder().record(handle)) for _ in range(2))
    send = PullAndSend(context, near, lambda: engines.sending_group)
    return WeightSync(context, engines=engines, routes=(pull, send), ring=ring)
