"""One session of one trainer rank, step by step, with all ranks in step where they must be.

run = SessionRun(session, request, ranks, settings, report)
run.open(group)                         # the request leaves
has_met = run.meet()                    # all ranks: every engine rank has joined
run.send(source, num_buffers)           # each rank at its own pace
loaded = run.finish(arrangements)       # its engine rank has read all
run.commit()                            # once all ranks have come so far
run.end(defers_reply=True)              # all ranks leave together
"""

from __future__ import annotations

import time

from sglang_loader.common.session.messages import BucketPiece, Loaded, SessionError
from verl_sglang_sync.collective import STEP_S, TrainerGroup
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.session import EngineFailed, TrainerSession
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.route import ReadyBucket, SyncSource
from verl_sglang_sync.sync.ranks_in_step import OpeningRequest, RanksInStep

MEET_TIMEOUT_S = 120.0
GIVE_UP_S = 5.0
"""How long a failed sync waits for the reply, so that the engine is done when the ranks leave."""


class SessionRun:
    """The state of one session.

    Args:
        session: of this rank; None where it could not be made: the rank has failed.
        request: opens the session on the engine.
        ranks: what all ranks agree on.
        settings: the preset.
        report: gets the counts and seconds.
    """

    def __init__(
        self,
        session: TrainerSession | None,
        request: OpeningRequest,
        ranks: RanksInStep,
        settings: WeightSyncConfig,
        report: SyncReport,
    ) -> None:
        self._session = session
        self._request = request
        self.ranks = ranks
        self._settings = settings
        self._report = report

    @property
    def session(self) -> TrainerSession:
        """Of a rank that has not failed."""
        assert self._session is not None, "a rank without a session has failed"
        return self._session

    def has_arrived(self) -> bool:
        """True if the engine is there to be met."""
        return self._session is not None and self._session.has_arrived()

    def open(self, group: TrainerGroup) -> None:
        """Gather the ranks' invitations and post them; all ranks join the gather."""
        invitation = b"" if self._session is None else self._session.invitation
        gathered = group.gather(invitation)
        if gathered is not None and all(gathered):
            self.ranks.run_if_ok(lambda: self._request.post(gathered))

    def meet(self) -> bool:
        """Wait, all ranks in step, until each has met its engine rank; False after a failure.

        Only the leader has a request that can fail: the others learn of it here.
        """
        limit_s = min(MEET_TIMEOUT_S, self._settings.request_timeout_s)
        deadline, has_met = time.monotonic() + limit_s, False

        def meet() -> bool:
            nonlocal has_met
            self._request.check()
            has_met = has_met or self.session.greet(self._request.check, wait_s=STEP_S)
            if not has_met and time.monotonic() > deadline:
                raise SessionError(f"the engine did not join within {limit_s:g} s")
            return has_met

        return self.ranks.repeat_until_all(meet)

    def send(self, source: SyncSource, num_buffers: int) -> None:
        """Send every bucket; the engine may still be at the last ones.

        Args:
            source: of the buckets.
            num_buffers: staging buffers, in which packed buckets take turns.
        """
        session, report = self.session, self._report
        source.map_memory(session)
        for ready in source:
            index, bucket = ready.index, ready.bucket
            is_pulled = ready.pieces is not None
            pieces = self._pieces(ready)
            session.load(index, bucket, pieces, read_only=is_pulled, arranged=ready.arranged)
            self.ranks.sent(bucket)
            report.num_arranged += bool(ready.arranged)
            report.sent_bytes += ready.nbytes if ready.arranged else bucket.payload_bytes
            free = index + 1 - num_buffers  # the next bucket takes this one's buffer
            if ready.storage is not None and free >= 0 and not bucket.is_last:
                with report.stage("load"):
                    session.wait_until_done(free)
        if not self.ranks.num_buckets:
            raise ValueError("the trainer exported no tensor")

    def _pieces(self, ready: ReadyBucket) -> list[BucketPiece]:
        """Where the engine finds the bucket; a staging buffer that it does not know is mapped."""
        if ready.storage is None:
            return ready.pieces or []
        slot = self.session.map_buffer(ready.storage, keep=self._settings.keep_staging_buffers)
        return [BucketPiece(slot, 0, 0, ready.nbytes)]

    def finish(self, arrangements: str | None) -> Loaded:
        """Have the engine rank read to the end; how it has loaded the buckets.

        Args:
            arrangements: digest of those that it need not tell; None: it need not tell any.
        """
        ranks, session = self.ranks, self.session
        session.finish(
            num_buckets=ranks.num_buckets,
            num_tensors=ranks.num_tensors,
            arrangements=arrangements,
        )
        with self._report.stage("load"):
            session.wait_until_done(ranks.num_buckets - 1)
        with self._report.stage("commit"):
            return session.outcome()

    def commit(self) -> None:
        """Have the weights published: all ranks have agreed that all is loaded."""
        self.ranks.may_be_served = True
        self.session.commit(self._request.check_refused)
        try:
            with self._report.stage("publish"):
                self.session.wait_until_published()
        except EngineFailed:  # its TP ranks have agreed to publish nothing
            self.ranks.may_be_served = False
            raise

    def end(self, *, defers_reply: bool) -> None:
        """All ranks leave together.

        Args:
            defers_reply: a stage of the engine follows, after which the request's reply is looked
                at: it is not waited for.

        Raises:
            WeightSyncError: on every rank, if any rank failed.
        """
        ranks, request = self.ranks, self._request

        def is_answered() -> bool:
            if defers_reply:
                return True
            has_come = request.wait(STEP_S)
            if has_come:
                request.result()
            return has_come

        if ranks.error is None:
            with self._report.stage("reply"):
                ranks.repeat_until_all(is_answered)
        if ranks.error is not None:
            if self._session is not None:
                watch = request.check_answer if request.may_have_left else None
                self._session.abort(ranks.error, watch)
            request.give_up(min(GIVE_UP_S, self._settings.request_timeout_s))
            ranks.agree()  # nobody leaves while an engine is still busy
        ranks.raise_error()
        self.session.keep_socket()
