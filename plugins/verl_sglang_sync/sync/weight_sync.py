"""One sync: requests open sessions with all engine ranks, and the weights go straight to them.

A trainer rank has sessions with the engine ranks that it gives weights to: one, many, or none. A
sync is a few sessions with each, one after the other:

    _bring          new weights, by a route that is proven, or by verl's full export. If that fails
                    before anything was published, once more, by the export, or by the same route
                    if parameters have only moved
    _prove_route    after an export from which a route has learnt: the same weights by that route.
                    The engines refuse other bytes than they hold, and the export is made again
    _prove_served   when a proof is due, or a user has asked an engine for one: the same weights by
                    the export, through `load_weights`. The engines compare them with what they held

`_once` is one session with each engine rank, and reads from top to bottom. Each rank goes through
it at its own pace. The ranks wait for each other until all engine ranks have joined, until all have
loaded the same (only then is anything published), and until every replica is done.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter

import torch

from sglang_loader.common.garbage_collection import no_full_collections
from sglang_loader.common.naming import listed
from sglang_loader.common.ranks import Interrupted, Reason, drop_frames
from sglang_loader.common.session.messages import LaterProof, Loaded, Proof
from verl_sglang_sync.engine.engine_ranks import OpeningRequest
from verl_sglang_sync.engine.update_groups import Replica
from verl_sglang_sync.report import SyncReport, warn_once
from verl_sglang_sync.routes.export import ExportedBuckets
from verl_sglang_sync.routes.route import (
    LoadedExport,
    Recovery,
    Route,
    RouteContext,
    RouteState,
    SyncSource,
)
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.sources.export import (
    Export,
    NamedTensor,
    is_repeatable,
    quantization_of,
)
from verl_sglang_sync.sync.engines import ColocatedEngine, RemoteEngines, SyncTask
from verl_sglang_sync.sync.sessions import FallbackRefused, Sessions, SyncFailed
from verl_sglang_sync.trainer_ranks import CopiesDiffer, RankLost

logger = logging.getLogger(__name__)

PROOF_FACTOR = 8
"""Syncs to the next proof, and from each to the one after it, where tensors hold the same bytes."""

CANNOT_PROVE = (
    "weight sync: a proof is due and is left out, so that nothing is compared: this trainer's "
    "export cannot be made a second time in one sync, which a proof needs"
)


PROVES_AGAIN = (
    "weight sync: the engine's load plan is of an earlier run, and the weights have not changed "
    "since its first proof. Each sync is proven by a full export, and takes longer, until they do"
)


@dataclass
class SyncPass:
    """One pass of a sync: one session with each engine rank, its orders and its outcome.

    The outcome of a good pass is equal on all ranks.

    Attributes:
        tries_route: the route is taken if it has something to offer, else the export.
        proof: what the session proves.
        due_proof_follows: another session of this sync proves what this one brings.
        ends_sync: no pass follows. The route learns nothing, and a user's request for a proof waits
            for the next sync.
        by_route: the route brought the weights, not the export.
        wants_proof: an engine, or its user, wants a proof of this sync, which can be made.
        differing: tensors that engines held with other bytes than an export that proves has.
        later_proof: the need for another proof, of all engine ranks. See `messages.LaterProof`.
    """

    task: SyncTask
    tries_route: bool = False
    proof: Proof = "none"
    due_proof_follows: bool = False
    ends_sync: bool = False
    by_route: bool = field(default=False, init=False)
    wants_proof: bool = field(default=False, init=False)
    differing: list[str] = field(default_factory=list, init=False)
    later_proof: LaterProof = field(default="none", init=False)

    @property
    def may_be_followed(self) -> bool:
        """True if another pass may prove what this one brings."""
        return self.proof == "none" and not self.ends_sync


class WeightSync:
    """All syncs of one trainer rank. Every trainer process has one.

    Args:
        route: how a sync is spared the full export.
        ring: the staging buffers. None on a rank that sends no exported bucket.
    """

    def __init__(
        self,
        context: RouteContext,
        *,
        engines: ColocatedEngine | RemoteEngines,
        route: Route,
        ring: StagingRing | None,
    ) -> None:
        # By the other strategy memory moves when it is shared by name.
        if context.device.type == "cpu":
            torch.multiprocessing.set_sharing_strategy("file_system")
        self._engines = engines
        self._route = route
        self._ranks = context.ranks
        self._settings = context.settings
        self._device = context.device
        self._cutter = context.cutter
        self._source_map = context.source_map
        self._ring = ring
        self._frees_ring = context.is_colocated  # only there the KV cache needs the memory
        # A stage of the engine follows each sync: `check_reply` is called after it.
        self._defers_reply = context.is_colocated and self._settings.free_cache_engine
        self._unanswered: list[OpeningRequest] = []
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
        """Send all of `weights`. Every trainer rank calls this, all return or all raise.

        Args:
            version: becomes the engines' weight version.
            replicas: of this sync, in disaggregated mode. Only the first rank's count.

        Raises:
            WeightSyncError: on every rank, if any rank failed.
        """
        # Nothing is awaited here: no other coroutine of this process runs until the sync has ended.
        task = SyncTask(weights=weights, version=version, report=report, replicas=replicas)
        try:
            # One section for the whole sync: a rank that fails meets the others in their next
            # call of `Ranks`, whichever call that is.
            with no_full_collections(), self._ranks.section():
                try:
                    self._sync(task)
                    # No rank may fail after the others have left: it would wait for them.
                    # Closing the sessions can fail on one rank alone, after `wait_for_replies`.
                    self._ranks.check()
                except (SyncFailed, Interrupted, CopiesDiffer):
                    raise  # all ranks have this error already
                except BaseException as error:  # outside of a session
                    Sessions(self._ranks, self._settings, report).fail(error, can_repeat=False)
        except BaseException as error:
            self._route.forget()  # the next sync is made as the first one was
            drop_frames(error)  # its text has those that matter
            raise
        finally:
            self._source_map.end_sync()

    def _sync(self, task: SyncTask) -> None:
        """Send new weights, and prove what is not proven yet."""
        number = self._num_syncs + 1
        every = self._settings.prove_every_n_syncs
        # A proof that an earlier one asked for, as it could not show everything.
        is_later_due = self._next_proof is not None and number >= self._next_proof
        is_due = is_later_due or (every > 0 and number % every == 0)
        self._route.begin_sync()
        if is_due and not self._ranks.all(is_repeatable(task.weights)):
            warn_once(CANNOT_PROVE)
            is_due = is_later_due = False

        sync_pass = self._bring(SyncPass(task, tries_route=True, due_proof_follows=is_due))
        is_due, is_proven = is_due or sync_pass.wants_proof, False
        # A failed proof may leave the route UNTRIED. The export that follows prepares the route
        # anew: with a traced load plan in place of a saved one, or with everything sent. Each of
        # the two happens at most once.
        while not sync_pass.by_route and self._route.state is RouteState.LEARNT:
            if is_proven := self._prove_route(task, due_proof_follows=is_later_due):
                break
            task.report.restart()
            # By the export: the weights are incomplete now, and the route has just failed.
            sync_pass = self._bring(SyncPass(task, due_proof_follows=is_due))
            is_due = is_due or sync_pass.wants_proof
        # The proof of the route does not stand for a later proof: a load plan may have loaded both
        # the export and the proof, and what that plan leaves out has the right bytes in neither.
        if is_later_due or (is_due and not is_proven):
            self._prove_served(task)
        if sync_pass.by_route:
            self._route.note_used()
        self._num_syncs = number

    def _bring(self, sync_pass: SyncPass) -> SyncPass:
        """Send new weights by the route if it has them, or by the export.

        A failure before anything was published costs a second pass. If the second one is by the
        route again, and fails, the third one is by the export.

        Returns:
            The pass that succeeded.
        """
        recovery: Recovery | None = None
        while True:
            try:
                self._once(sync_pass)
                return sync_pass
            except SyncFailed as error:
                is_last = recovery is Recovery.EXPORT
                if error.may_be_served or not error.can_repeat or is_last:
                    raise
                drop_frames(error)  # they hold the groups and buffers of this pass
                recovery = self._recovery(sync_pass, error.__cause__, is_first=recovery is None)
                logger.warning(
                    "weight sync: nothing was published, so the sync is made again %s, which costs "
                    "the seconds of another sync: %s",
                    recovery.value,
                    error,
                )
            sync_pass.task.report.restart()
            # The new pass begins without an outcome: `replace` copies no field without `init`.
            sync_pass = replace(sync_pass, tries_route=recovery is Recovery.AGAIN)

    def _recovery(
        self, sync_pass: SyncPass, cause: BaseException | None, *, is_first: bool
    ) -> Recovery:
        """Decide how to repeat a failed pass. Collective.

        Args:
            is_first: no pass of this sync has failed before.
        """
        # A rank that failed before its choice has chosen nothing. Then the route is not at fault.
        if not self._ranks.all(sync_pass.by_route):
            return Recovery.EXPORT
        if is_first:
            return self._route.recover(cause, sync_pass.task.weights)
        self._route.note_outdated()
        return Recovery.EXPORT

    def _prove_route(self, task: SyncTask, *, due_proof_follows: bool) -> bool:
        """Send the weights that an export has just brought by the route that has learnt from it.

        Args:
            due_proof_follows: see `SyncPass`.

        Returns:
            False if the engines got other bytes, or none. Their weights are incomplete now, and
            their gates closed.
        """
        route = self._route
        sync_pass = SyncPass(
            _without_report(task),
            tries_route=True,
            proof="route",
            due_proof_follows=due_proof_follows,
        )
        try:
            with task.report.stage("prove"):
                self._once(sync_pass)
        except SyncFailed as error:
            if error.may_be_served or not error.can_repeat:
                raise
            differs = any(ending.differs for ending in error.endings)
            if not differs and any(ending.saved_plan_differs for ending in error.endings):
                # The engine traces the export that follows, and the route learns from it again.
                logger.warning(
                    "weight sync: the load plan that an engine had saved in an earlier run is "
                    "wrong and was removed. This sync takes some seconds longer: %s",
                    error,
                )
                route.forget()
                return False
            reason = Reason(f"its proof failed: {error}", is_final=differs)
            cannot_map = any(ending.cannot_map for ending in error.endings)
            route.refuse_unproven(reason, cannot_map=cannot_map)
            return False
        if not sync_pass.by_route:
            # The parameters could not be located, so the export came once more, by the load plan.
            # The weights are proven. What a saved load plan leaves out shows in the next sync.
            task.report.is_proven = True
            self._next_proof = self._num_syncs + 2 if sync_pass.later_proof != "none" else None
            return True
        route.note_proven()
        task.report.is_proven = True
        self._proof_distance = 1  # what is known of alike tensors was known of another route
        self._schedule_proof(sync_pass.later_proof)
        return True

    def _prove_served(self, task: SyncTask) -> None:
        """Check that the engines serve what the trainer has.

        The weights go once more by the export, through `load_weights`, and the engines compare
        them with what they held. If they differ, the engines have the right weights now, and no
        route is taken any more.
        """
        sync_pass = SyncPass(_without_report(task), proof="served")
        with task.report.stage("prove"):
            self._route.check_copies(task.weights)
            try:
                self._once(sync_pass)
            except SyncFailed as error:
                if error.may_be_served or not error.can_repeat:
                    raise
                logger.warning("weight sync: not proven, exported in full again: %s", error)
                # Nothing follows it that could open the gates.
                self._once(SyncPass(sync_pass.task, ends_sync=True))
                self._next_proof = self._num_syncs + 2  # the next sync
                return
        task.report.is_proven = not sync_pass.differing
        is_early = self._next_proof is not None and self._num_syncs + 1 < self._next_proof
        # A proof that is asked for does not put off one that alike tensors need.
        if not (is_early and sync_pass.later_proof == "later"):
            self._schedule_proof(sync_pass.later_proof)
        if sync_pass.later_proof == "next_sync":
            warn_once(PROVES_AGAIN)
        if not sync_pass.differing:
            logger.info("weight sync: proven: the engines serve the trainer's weights bit for bit")
            return
        text = (
            f"a proof found {len(sync_pass.differing)} tensors that were not served as the trainer "
            f"has them: {listed(sync_pass.differing)}"
        )
        self._route.refuse(Reason(text, is_final=True))
        logger.error("weight sync: %s. The engines have the right weights now, by export.", text)

    def _schedule_proof(self, later_proof: LaterProof) -> None:
        """Schedule the next proof, after a good one.

        Args:
            later_proof: what the proof could not show, see `messages.LaterProof`.
        """
        self._next_proof = None
        if later_proof == "next_sync":
            self._next_proof = self._num_syncs + 2
        elif later_proof == "later" and self._route.is_prepared:
            self._next_proof = self._num_syncs + 1 + self._proof_distance
            self._proof_distance *= PROOF_FACTOR

    def check_reply(self, report: SyncReport) -> None:
        """Raise a bad reply to the last sync's requests. Called after the engine's next stage."""
        requests, self._unanswered = self._unanswered, []
        for request in requests:
            with report.stage("reply"):
                request.result()

    def _once(self, sync_pass: SyncPass) -> None:
        """Run one session with each engine rank, from the request that opens it to its reply.

        "[all]" marks the calls in which all trainer ranks meet.

        Raises:
            WeightSyncError: on every rank, if any rank failed.
        """
        task, proof, ranks = sync_pass.task, sync_pass.proof, self._ranks
        weights, report = task.weights, task.report
        with ExitStack() as stack:
            # The order of exit: the sessions, in which engines may read the source's memory until
            # then, the callback after a failure, the source's memory, unmapped memory.
            stack.callback(self._collect_unmapped)
            memory = stack.enter_context(ExitStack())
            stack.push(self._abandon_after_failure)
            sessions = Sessions(ranks, self._settings, report)
            try:
                # The reply to the first session of a sync is checked before the second begins.
                self.check_reply(report)
                with report.stage("open"):
                    # The requests leave first: engines join and drop their prefix caches while this
                    # rank traces, locates and waits for its device.
                    self._engines.open(stack, sessions.engine_ranks, task, proof)  # [all]
                # [all] if the export is traced, or the parameters are located or compared.
                source = self._choose(sync_pass, sessions)
                memory.callback(source.close)
                is_exported = isinstance(source, ExportedBuckets)
                if is_exported:
                    ranks.check()  # [all]: the export's collectives need every rank
                try:
                    # All ranks meet in `wait_joined`, so a failure is shared at once. From `send`
                    # on, a rank that fails takes part in the rest of the export first.
                    with ranks.section():  # a failure in it ends the sync on all ranks
                        source.start()  # [all] in the collectives of an export's first bucket
                        with report.stage("open"):
                            can_prove = is_repeatable(weights)
                            wants_proof = sessions.wait_joined(can_prove=can_prove)  # [all]
                        if sessions.asks_for_proof and not can_prove:
                            warn_once(CANNOT_PROVE)
                        # Any load plan serves an export: the engine compares each layout with the
                        # plan's.
                        if not is_exported:
                            sessions.check_plans(proves=proof == "route")
                            if source.is_collective:
                                ranks.check()  # [all]
                    sessions.send(source)  # [all] in an export, or if shards are sent
                except RankLost:
                    raise  # the rest of the export would wait for that rank
                except BaseException:
                    source.drain()  # the other ranks need this one's part of the export
                    raise
                source.drain()
                learns = sync_pass.may_be_followed and is_exported
                sessions.finish()
                # While the engines copy. Nothing is published before Commit.
                source.confirm()
                self._prepare_to_learn(task, learns)
                self._engines.prepare_next()
                loaded = sessions.wait_until_loaded(source.confirm_unwritten)  # [all]
                self._record_loaded(loaded, report)
                # Before Commit, which names the session that follows, and after which `on_fallback`
                # could not stop the sync. The type is checked again for mypy.
                if isinstance(source, ExportedBuckets) and learns:
                    self._learn(task, source, loaded)  # [all]
                    self._check_fallback()
                    ranks.check()  # [all]: no rank may fail between here and its Commit
                sync_pass.wants_proof = sync_pass.may_be_followed and wants_proof
                # The engines' gates stay closed while a proof follows.
                follows = sync_pass.due_proof_follows or sync_pass.wants_proof
                follows = follows or (learns and self._route.state is RouteState.LEARNT)
                sessions.commit(is_last=not follows)
                # Not before Published: an engine that fails until then unmaps all blocks.
                source.end()
                sessions.wait_for_replies(defers_reply=self._defers_reply)  # [all]
            except BaseException as error:
                sessions.fail(error, can_repeat=is_repeatable(weights))  # [all]
        # Published has reported the outcome already, so nothing waits for the reply here.
        self._unanswered = sessions.requests if self._defers_reply else []
        if is_exported:
            # Engines unmap each block that a session does not keep, and an export keeps none.
            self._route.note_unmapped()
        if proof == "route":
            for engine_rank in sessions.engine_ranks:
                # `Sessions.check_plans` compares the load plans of later syncs with this one.
                engine_rank.known.proven_plan = engine_rank.session.plan
        if proof != "none":
            self._note_compared(sync_pass, loaded)  # [all]

    def _choose(self, sync_pass: SyncPass, sessions: Sessions) -> SyncSource:
        """Return what the route offers if it has this sync's weights, else the export."""
        weights, report = sync_pass.task.weights, sync_pass.task.report
        if sync_pass.tries_route:
            source = self._route.choose(weights, report, proves=sync_pass.proof == "route")
            if source is not None:
                sync_pass.by_route = True
                return source
        comparison = None
        if sync_pass.may_be_followed and self._route.can_learn(weights):
            with report.stage("learn"):
                comparison = self._source_map.compare_while_exported(weights)
        is_quantized = quantization_of(weights) is not None
        observe = comparison.add if comparison is not None and is_quantized else None
        return ExportedBuckets(
            Export(weights, observe),
            self._cutter,
            self._ring,
            report,
            delivery=self._engines.delivery(sessions.engine_ranks, report),
            frees_ring=self._frees_ring,
            comparison=comparison,
            compares_buckets=comparison is not None and not is_quantized,
        )

    def _prepare_to_learn(self, task: SyncTask, learns: bool) -> None:
        if learns and self._route.can_learn(task.weights):
            with task.report.stage("learn"):
                self._route.prepare_to_learn(task.weights)

    def _note_compared(self, sync_pass: SyncPass, loaded: Sequence[Loaded]) -> None:
        """Collect what the proof found on all engine ranks."""
        own = [(each.differing, each.later_proof) for each in loaded]
        found = list(chain.from_iterable(self._ranks.gather(own)))
        sync_pass.differing = list(dict.fromkeys(name for names, _ in found for name in names))
        needs: tuple[LaterProof, ...] = ("next_sync", "later")
        wanted = {later_proof for _, later_proof in found}
        sync_pass.later_proof = next((need for need in needs if need in wanted), "none")

    def _record_loaded(self, loaded: Sequence[Loaded], report: SyncReport) -> None:
        if loaded:
            least = min(loaded, key=attrgetter("num_replayed"))
            report.num_replayed, report.num_eager = least.num_replayed, least.num_eager
            report.eager_reason, report.engine_seconds = least.reason, least.seconds

    def _learn(self, task: SyncTask, source: ExportedBuckets, loaded: Sequence[Loaded]) -> None:
        """Prepare the route by which the next syncs go, after an export that is loaded."""
        if self._route.can_learn(task.weights):
            assert source.comparison is not None, "made for a route that can learn"
            with task.report.stage("learn"):
                self._route.learn(LoadedExport(task.weights, loaded, source.comparison))

    def _check_fallback(self) -> None:
        """Raise FallbackRefused if no route was prepared, and the user would rather stop."""
        settings = self._settings
        if settings.on_fallback != "error" or not settings.routes:
            return
        route = self._route
        if route.state is RouteState.LEARNT or not route.reason:
            return
        raise FallbackRefused(
            "on_fallback=error, and the next syncs would be exported in full: "
            f"{route.fallback_text}: {route.reason}. Set on_fallback=warn to go on slower"
        )

    def _abandon_after_failure(self, _: object, error: object, __: object) -> None:
        if error is not None:
            self._engines.abandon()

    def _collect_unmapped(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # what the engine has let go of


def _without_report(task: SyncTask) -> SyncTask:
    """Return the task of a session that proves, which the report of the sync does not count."""
    report = SyncReport(mode=task.report.mode, replica=task.report.replica)
    return replace(task, report=report)
