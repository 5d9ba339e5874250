"""The sessions of one trainer rank in one sync, step by step, in step with the other ranks.

run = Sessions(*opened, ranks, settings, report)  # the requests have left
run.meet()                              # all ranks: every engine rank has joined
run.check_plans(source, proves=False)   # with what the way was proven with
run.send(source)                        # each rank at its own pace
run.finish(source, meanwhile)           # its engine ranks have read all
loaded = run.wait_until_loaded()        # all ranks: every engine has judged what it has loaded
run.commit(is_last=True)                # once all ranks have come so far
run.end(defers_reply=True)              # all ranks leave together
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_loader.common.session.messages import Loaded, PeerLost
from verl_sglang_sync.collective import AGREE_EVERY_S
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.engine_ranks import (
    EngineRank,
    OpeningRequest,
    for_each,
    poll,
    wait_for,
)
from verl_sglang_sync.engine.session import EngineFailed
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.route import Delivery, SyncSource
from verl_sglang_sync.sync.ranks_in_step import RanksInStep

MEET_TIMEOUT_S = 120.0
GIVE_UP_S = 5.0
"""How long a failed sync waits for the replies, so that the engines are done when ranks leave."""


class WayOutdated(RuntimeError):
    """A fast way was prepared for other load plans than the engines hold now."""


@dataclass(eq=False)
class Sessions:
    """The state of one sync's sessions: this rank's, which may be none.

    Attributes:
        delivery: of buckets whose source has no other.
    """

    engines: Sequence[EngineRank]
    delivery: Delivery
    ranks: RanksInStep
    settings: WeightSyncConfig
    report: SyncReport

    def check_plans(self, source: SyncSource, *, proves: bool) -> None:
        """Check that the joined engine ranks hold what the source's buckets are made for.

        Args:
            proves: the session proves this way, with whatever plans the engines hold.

        Raises:
            WayOutdated: an engine rank holds another load plan than the one that the way was
                proven with, or other arrangements than its buckets have.
        """
        needed = source.required_arrangements
        for engine in self.engines if not proves else ():
            if engine.session.plan != engine.arrangements.proven_plan:
                raise WayOutdated("an engine's load plan is not the one of the proof")
        far = [engine for engine in self.engines if not engine.arrangements.reads_in_place]
        held = [engine.session.arrangements for engine in far]
        for digest, own in zip(needed, held, strict=True) if needed is not None else ():
            if digest not in ("", own):  # "": whole buckets, the engine may hold any
                raise WayOutdated("an engine reads other parts of buckets than were planned")

    @property
    def requests(self) -> list[OpeningRequest]:
        """Those that this rank's engine ranks were asked by."""
        return list(dict.fromkeys(engine.request for engine in self.engines))

    def meet(self) -> bool:
        """Wait, all ranks in step, until each has met its engine ranks; False after a failure.

        Only a rank that has sent a request can see it fail: the others learn of it here.
        """
        limit_s = min(MEET_TIMEOUT_S, self.settings.request_timeout_s)
        deadline, unmet = time.monotonic() + limit_s, list(self.engines)

        def meet() -> bool:
            while unmet:
                engine = unmet[0]
                with engine.naming_errors():
                    if not engine.session.greet(engine.request.check, wait_s=AGREE_EVERY_S):
                        if time.monotonic() > deadline:
                            raise PeerLost(f"the engine did not join within {limit_s:g} s")
                        return False
                self.ranks.asks_for_proof |= engine.session.wants_proof
                unmet.pop(0)
            for request in self.requests:
                request.check()
            return True

        return self.ranks.repeat_until_all(meet)

    def send(self, source: SyncSource) -> None:
        """Send every bucket; the engines may still be at the last ones."""
        report = self.report
        delivery = source.delivery(self.engines, self.ranks.repeat_until_all) or self.delivery
        for ready in source:
            bucket = ready.bucket
            if not delivery.deliver(ready):
                return
            self.ranks.count(bucket)
            report.count_bucket(len(bucket.layout.tensors), bucket.payload_bytes)
            report.num_arranged += ready.arranged
            report.sent_bytes += ready.nbytes if ready.arranged else bucket.payload_bytes
            if not bucket.is_last:
                delivery.make_room()
        if not self.ranks.num_buckets:
            raise ValueError("the trainer exported no tensor")

    def finish(self, source: SyncSource, meanwhile: Callable[[], None]) -> None:
        """Call `meanwhile` while the engine ranks read to the end."""
        ranks, asks = self.ranks, source.asks_for_arrangements
        for engine in self.engines:
            with engine.naming_errors():
                engine.session.finish(
                    num_buckets=ranks.num_buckets,
                    num_tensors=ranks.num_tensors,
                    arrangements=engine.arrangements.held_digest if asks else None,
                )
        meanwhile()
        limit_s = self.settings.request_timeout_s
        with self.report.stage("load"):
            wait_for(self.engines, lambda s: s.num_done == ranks.num_buckets, limit_s)

    def wait_until_loaded(self) -> list[Loaded] | None:
        """Wait, all ranks in step, until each engine rank reports how it has loaded.

        An engine rank reports only once all TP ranks of its engine have loaded, which other trainer
        ranks may have failed to bring about.

        Returns:
            None after a failure on any rank.
        """
        deadline = time.monotonic() + self.settings.request_timeout_s

        def have_loaded() -> bool:
            pause = time.monotonic() + AGREE_EVERY_S
            while True:
                poll(self.engines)
                waiting = next((e for e in self.engines if e.session.loaded is None), None)
                if waiting is None:
                    return True
                if time.monotonic() > deadline:
                    with waiting.naming_errors():
                        raise PeerLost(f"not loaded within {self.settings.request_timeout_s:g} s")
                if time.monotonic() > pause:
                    return False
                waiting.session.wait_briefly()

        with self.report.stage("commit"):
            if not self.ranks.repeat_until_all(have_loaded):
                return None
        return [e.session.loaded for e in self.engines if e.session.loaded is not None]

    def commit(self, *, is_last: bool) -> None:
        """Have the weights published: all ranks have agreed that all is loaded.

        Args:
            is_last: False: no request may run before the sync's next session has ended.
        """
        self.ranks.may_be_served = True
        try:
            with self.report.stage("publish"):
                for_each(
                    self.engines,
                    lambda e: e.session.commit(e.request.check_refused, is_last=is_last),
                )
                for_each(self.engines, lambda e: e.session.wait_until_published())
        except EngineFailed:  # its TP ranks have agreed to publish nothing
            self.ranks.may_be_served = len(self.requests) > 1
            raise

    def end(self, *, defers_reply: bool) -> None:
        """All ranks leave together.

        Args:
            defers_reply: a stage of the engine follows, after which the request's reply is looked
                at: it is not waited for.

        Raises:
            WeightSyncError: on every rank, if any rank failed.
        """
        ranks, requests = self.ranks, self.requests

        def are_answered() -> bool:
            if defers_reply:
                return True
            have_come = all(request.wait(AGREE_EVERY_S) for request in requests)
            if have_come:
                for request in requests:
                    request.result()
            return have_come

        if ranks.error is None:
            with self.report.stage("reply"):
                ranks.repeat_until_all(are_answered)
        if ranks.error is not None:
            lost = self._abort(ranks.error)
            ranks.agree(learnt_since=lost)  # nobody leaves while an engine is still busy
        ranks.raise_error()

    def _abort(self, reason: str) -> str | None:
        """Tell the engine ranks to give up, and wait until they have, `GIVE_UP_S` at most.

        Returns:
            The servers that were lost meanwhile, if any. One that died ends a collective for the
            other engines, and one of those may have told of its own failure first.
        """
        for engine in self.engines:
            request = engine.request
            engine.session.abort(reason, request.check_answer if request.may_have_left else None)
        deadline = time.monotonic() + min(GIVE_UP_S, self.settings.request_timeout_s)
        lost = [r.give_up(max(0.0, deadline - time.monotonic())) for r in self.requests]
        return "\n".join(text for text in lost if text and text not in reason) or None
