"""The sessions of one trainer rank in one sync, step by step, together with the other ranks.

sessions = Sessions(ranks, settings, report)
engines.open(stack, sessions.engine_ranks, task, proof)   # the requests have left
sessions.wait_joined(can_prove=True)         # all ranks: every engine rank has joined
sessions.check_plans(proves=False)           # with what the route was proven with
sessions.send(source)                        # each rank at its own pace
sessions.finish()                            # everything was announced to its engine ranks
loaded = sessions.wait_until_loaded(source.confirm_unwritten)   # all ranks: every engine has loaded
sessions.commit(is_last=True)                # once all ranks have come so far
sessions.wait_for_replies(defers_reply=False)   # all ranks leave together
sessions.fail(error, can_repeat=True)        # instead of the steps that are left, after a failure
"""

from __future__ import annotations

import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NoReturn

from sglang_loader.common.ranks import Interrupted, Ranks, RanksFailed, attempt
from sglang_loader.common.session.messages import Loaded, PeerLost
from sglang_loader.common.shared_memory import BufferHandle, drop_references, is_counted_here
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.engine_ranks import EngineRank, OpeningRequest, waiting
from verl_sglang_sync.engine.server_client.errors import ReplyLost, ServerUnreachable
from verl_sglang_sync.engine.session import (
    EngineCannotMap,
    EngineFailed,
    Misfit,
    ProofFailed,
    SavedPlanFailed,
    TrainerSession,
)
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.route import SyncSource
from verl_sglang_sync.sources.bucket_cutter import Bucket
from verl_sglang_sync.trainer_ranks import AGREE_EVERY_S, CopiesDiffer, RankLost, WeightSyncError

JOIN_TIMEOUT_S = 120.0
GIVE_UP_S = 5.0
"""Longest wait of a failed sync for the replies, so that engines are done when ranks leave."""
MAY_BE_INCOMPLETE = "the engine's weights may be incomplete"
HAPPENED_IN = "It happened in stage"
MAY_SERVE = "the engine may serve the new weights already"


class FallbackRefused(RuntimeError):
    """The next syncs would be exported in full, and `on_fallback=error` forbids that."""


HOPELESS = PeerLost | Misfit | FallbackRefused | ServerUnreachable | ReplyLost
"""Errors of a sync that would come again if it were made again."""


@dataclass(frozen=True)
class Ending:
    """The end of a failed sync on one rank, as the other ranks are told.

    Attributes:
        may_be_served: an engine of the rank may serve the new weights already.
        can_repeat: the rank can make the sync again, and may succeed then.
        differs: a proof found other bytes.
        saved_plan_differs: a proof found other bytes, left by a load plan that an engine had saved.
        cannot_map: an engine cannot map the trainer's memory.
        details: what the rank has learnt since it failed, or None.
    """

    may_be_served: bool
    can_repeat: bool
    differs: bool
    saved_plan_differs: bool
    cannot_map: bool
    details: object


class SyncFailed(WeightSyncError):
    """A sync failed, and all ranks have ended their sessions.

    Attributes:
        endings: by rank, equal on all ranks.
    """

    def __init__(self, failures: Sequence[str], endings: Sequence[Ending]) -> None:
        self.endings = endings
        state = MAY_SERVE if self.may_be_served else MAY_BE_INCOMPLETE
        details = [f"rank {rank}: {e.details}" for rank, e in enumerate(endings) if e.details]
        text = "\n".join((f"weight sync failed, and {state}", *failures, *details))
        super().__init__(text, failures)

    @property
    def may_be_served(self) -> bool:
        """True if an engine may serve the new weights already."""
        return any(ending.may_be_served for ending in self.endings)

    @property
    def can_repeat(self) -> bool:
        """True if all ranks can make the sync again, and may succeed then."""
        return all(ending.can_repeat for ending in self.endings)


class RouteOutdated(RuntimeError):
    """A route was prepared for other load plans than the engines hold now."""


@dataclass(frozen=True)
class SentBuckets:
    """The buckets that a trainer rank has sent, which are the same on all ranks.

    Attributes:
        checksum: of the names, shapes and dtypes of their tensors.
    """

    num_buckets: int = 0
    num_tensors: int = 0
    checksum: int = 0

    def __str__(self) -> str:
        return (
            f"{self.num_tensors} tensors, whose names, shapes and dtypes have the checksum "
            f"{self.checksum}"
        )

    def and_bucket(self, bucket: Bucket) -> SentBuckets:
        """Return what was sent with another bucket."""
        num_tensors = self.num_tensors + len(bucket.layout.tensors)
        checksum = zlib.crc32(bucket.digest.encode(), self.checksum)
        return SentBuckets(self.num_buckets + 1, num_tensors, checksum)


@dataclass(eq=False)
class Sessions:
    """The state of this rank's sessions in one sync.

    Attributes:
        engine_ranks: one for each session. A trainer rank may have none.
        sent: what this rank has sent.
        may_be_served: this rank has told its engine to publish, which has not refused.
    """

    ranks: Ranks
    settings: WeightSyncConfig
    report: SyncReport
    engine_ranks: list[EngineRank] = field(default_factory=list)
    sent: SentBuckets = SentBuckets()
    may_be_served: bool = False

    @property
    def requests(self) -> list[OpeningRequest]:
        """The requests that opened these sessions."""
        return list(dict.fromkeys(engine_rank.request for engine_rank in self.engine_ranks))

    def wait_joined(self, *, can_prove: bool) -> bool:
        """Wait until the engine ranks of all ranks have joined their sessions.

        Args:
            can_prove: this rank can make the export once more.

        Returns:
            True if an engine wants a proof, mostly for a user, and all ranks can make it.
        """
        limit_s = min(JOIN_TIMEOUT_S, self.settings.request_timeout_s)
        deadline, unjoined = time.monotonic() + limit_s, list(self.engine_ranks)

        def join() -> tuple[bool, bool, list[BufferHandle]] | None:
            while unjoined:
                engine_rank = unjoined[0]
                with engine_rank.naming_errors():
                    # `accept` sends Welcome at once. Only the end of `wait_joined` shows that all
                    # engine ranks have joined.
                    if not engine_rank.session.accept(
                        engine_rank.request.check, wait_s=AGREE_EVERY_S
                    ):
                        # Agree with the other ranks before the next wait: one may have failed.
                        if time.monotonic() > deadline:
                            raise PeerLost(f"the engine did not join within {limit_s:g} s")
                        return None
                unjoined.pop(0)
            for request in self.requests:
                request.check()
            dropped = [each.session.dropped_elsewhere for each in self.engine_ranks]
            return self.asks_for_proof, can_prove, list(chain(*dropped))

        asking, able, dropped = zip(*self.ranks.poll(join), strict=True)
        # An engine on this rank's host may have died, and its session is the first rank's.
        drop_references(filter(is_counted_here, chain(*dropped)))
        return any(asking) and all(able)

    @property
    def asks_for_proof(self) -> bool:
        """True if an engine of this rank wants a proof, mostly for a user."""
        return any(engine_rank.session.wants_proof for engine_rank in self.engine_ranks)

    def check_plans(self, *, proves: bool) -> None:
        """Check that the joined engine ranks hold the load plans of the proof.

        Args:
            proves: the session proves this route, with whatever plans the engines hold.

        Raises:
            RouteOutdated: an engine rank holds another load plan than the one of the proof.
        """
        # Another plan may be as right, but no proof has shown that with this route.
        # If the engine drops its plan after Hello, `load_weights` loads the mapped shards.
        for engine_rank in self.engine_ranks if not proves else ():
            if engine_rank.session.plan != engine_rank.known.proven_plan:
                raise RouteOutdated("an engine's load plan is not the one of the proof")

    def count(self, bucket: Bucket) -> None:
        """Count a bucket whose weights were sent."""
        self.sent = self.sent.and_bucket(bucket)
        self.report.count_bucket(len(bucket.layout.tensors), bucket.payload_bytes)
        self.report.sent_bytes += bucket.payload_bytes

    def send(self, source: SyncSource) -> None:
        """Send everything. The engines may still be at the last loads."""
        source.send(self)
        # The copy table counts its buckets, too: the checks of what was sent hold for all sources.
        if not self.sent.num_buckets:
            raise ValueError("the trainer exported no tensor")

    def finish(self) -> None:
        """Report to this rank's engine ranks that everything was announced."""
        # The engines check the number of tensors: a lost message must not end a sync early.
        for engine_rank in self.engine_ranks:
            with engine_rank.naming_errors():
                engine_rank.session.finish(num_tensors=self.sent.num_tensors)

    def wait_until_loaded(self, confirm_unwritten: Callable[[], None]) -> list[Loaded]:
        """Wait until all ranks' engine ranks report how they have loaded.

        Args:
            confirm_unwritten: is called, at least once, when this rank's engine ranks have loaded.

        Returns:
            The reports of this rank's engine ranks.
        """

        def has_loaded(session: TrainerSession) -> bool:
            return session.loaded is not None

        # An engine rank reports only once all TP ranks of its engine have got everything, which
        # other trainer ranks may have failed to bring about.
        limit_s = self.settings.request_timeout_s
        have_loaded = waiting(self.engine_ranks, has_loaded, limit_s, "not loaded")

        def load() -> bool | None:
            if (loaded := have_loaded()) is not None:
                confirm_unwritten()  # here, so that all ranks agree to commit after it
            return loaded

        # The stage ends when all agree to commit. Commit itself is sent in stage "publish".
        with self.report.stage("load"):
            self.ranks.poll(
                load, same=self.sent, differ="the trainer ranks exported different tensors"
            )
        return [e.session.loaded for e in self.engine_ranks if e.session.loaded is not None]

    def commit(self, *, is_last: bool) -> None:
        """Publish the weights, after all ranks have agreed that everything is loaded.

        Args:
            is_last: False: no request may run before the sync's next session has ended.
        """
        # Set before the first Commit, which may arrive though its sending fails.
        self.may_be_served = bool(self.engine_ranks)
        try:
            with self.report.stage("publish"):
                for engine_rank in self.engine_ranks:
                    with engine_rank.naming_errors():
                        engine_rank.session.commit(
                            engine_rank.request.check_refused, is_last=is_last
                        )
                # This rank has sent all its Commits, so no replica waits until another one has
                # published.
                # If a trainer rank dies before its Commit, all TP ranks fail, and this wait ends.
                for engine_rank in self.engine_ranks:
                    with engine_rank.naming_errors():
                        engine_rank.session.wait_until_published()
        except EngineFailed:  # its TP ranks have agreed to publish nothing
            # Another replica may have published.
            self.may_be_served = len(self.requests) > 1
            raise

    def wait_for_replies(self, *, defers_reply: bool) -> None:
        """Wait for all ranks, and for the replies to their requests unless these are deferred.

        Args:
            defers_reply: True if a stage of the engine follows, which is the usual case. The reply
                is then checked after that stage, and this method does not wait for it.
        """

        def are_answered() -> bool | None:
            # The ranks still meet: none frees memory or wakes an engine before all have published.
            if defers_reply:
                return True
            requests = self.requests
            if not all(request.wait(AGREE_EVERY_S) for request in requests):
                return None
            for request in requests:
                request.result()
            return True

        with self.report.stage("reply"):
            self.ranks.poll(are_answered)

    def fail(self, error: BaseException, *, can_repeat: bool) -> NoReturn:
        """End the failed sync: all ranks leave with the same error, once their engines are done.

        Args:
            error: of this rank, or one that all ranks raise.
            can_repeat: this rank can make the sync again.

        Raises:
            WeightSyncError: on every rank. Its cause is the exception of this rank, if any.
            Interrupted: instead of it, for an interrupt of this rank.
        """
        # First agree that the sync has failed, so that no rank commits.
        is_own = not isinstance(error, RanksFailed)
        own = "".join(traceback.format_exception(error)) if is_own else ""
        try:
            self.ranks.check(error)
        except RanksFailed as failed:
            shared = failed
        # With a rank gone nothing can be agreed on any more.
        if isinstance(shared, RankLost):
            if HAPPENED_IN in str(shared):  # this error has ended a session, and comes here again
                raise shared
            self._abort(str(shared))
            served = MAY_SERVE if self.may_be_served else ""
            stage = self.report.failed_stage
            where = f"{HAPPENED_IN} {stage} of the sync." if stage else ""
            lost = RankLost("\n".join(filter(None, (str(shared), where, served, own))))
            raise lost from shared.__cause__
        lost_servers, problem = attempt(partial(self._abort, str(shared)))
        cause = shared.__cause__
        is_hopeless = isinstance(cause, HOPELESS) or isinstance(shared, Interrupted)
        ending = Ending(
            may_be_served=self.may_be_served,
            can_repeat=can_repeat and not is_hopeless,
            differs=isinstance(cause, ProofFailed),
            saved_plan_differs=isinstance(cause, SavedPlanFailed),
            cannot_map=isinstance(cause, EngineCannotMap),
            details=lost_servers or problem,
        )
        # No rank leaves before the engines of all ranks have had `GIVE_UP_S` to end.
        endings = [ending] if shared.is_alone else self.ranks.gather(ending)
        if isinstance(shared, CopiesDiffer | Interrupted):
            raise shared
        raise SyncFailed(shared.failures, endings) from cause

    def _abort(self, reason: str) -> str | None:
        """Abort all sessions, and wait until the engine ranks have given up, `GIVE_UP_S` at most.

        Returns:
            The errors of servers that were lost meanwhile, or None. If a server dies, a collective
            of the other engines fails, and one of those engines may report its failure first.
        """
        for engine_rank in self.engine_ranks:
            request = engine_rank.request
            engine_rank.session.abort(
                reason, request.check_answer if request.may_have_left else None
            )
        deadline = time.monotonic() + min(GIVE_UP_S, self.settings.request_timeout_s)
        lost = [r.give_up(max(0.0, deadline - time.monotonic())) for r in self.requests]
        return "\n".join(text for text in lost if text and text not in reason) or None
