"""Mode "compiled": one request opens a session on all ranks, buckets go straight to the engine.

Every trainer rank has a session of its own with the engine rank on its device, so ranks are not in
step within a sync; they agree three times: everyone has joined, everyone has sent the same, every
replica is done. A rank that fails in between goes on exporting (the export's collectives need
it), then all leave together with the same `WeightSyncError`.

A bucket is read where it lies, or is packed: arranged (see `arranged_sending`) or whole; or the
ranks fill it from their shards, without an export (see `session_exchange`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain

import torch

from sglang_loader.ipc import serialize_handles
from sglang_loader.manifest import ManifestError
from sglang_loader.session_messages import BucketPiece, Committed, SessionError
from verl_sglang_sync.arranged_sending import ArrangedTurn, KnownArrangements
from verl_sglang_sync.bucket_stream import Batch, BucketStream
from verl_sglang_sync.collective import TrainerGroup
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.manifest_gate import Announcement, ManifestGate
from verl_sglang_sync.memory_blocks import BlockNames
from verl_sglang_sync.packing import NamedTensor
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.session_exchange import ExchangedBucket, ExchangedBuckets, SessionExchange
from verl_sglang_sync.session_ranks import OpeningRequest, RanksInStep
from verl_sglang_sync.session_staging import StagingRing
from verl_sglang_sync.shard_exchange import Turn
from verl_sglang_sync.source import InPlaceSource, LocatedBucket, SourceWatch
from verl_sglang_sync.trainer_session import SocketFolder, TrainerSession
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
        self._sockets = SocketFolder()
        self._stream = BucketStream(settings.bucket_bytes)
        self._ring = StagingRing(
            device,
            num_buffers=settings.num_staging_buffers,
            bucket_bytes=settings.bucket_bytes,
        )
        self._names = BlockNames()
        self._watch = SourceWatch(device) if settings.read_in_place else None
        self._in_place: InPlaceSource | None = None
        self._used: frozenset[str] = frozenset()
        self._gate = ManifestGate(settings.manifest_check, group.agree)
        self._wants_arrangements = settings.plan_ordered
        self._arrangements: KnownArrangements | None = None
        self._exchange = SessionExchange(settings, group, device)

    async def sync(
        self, weights: Iterable[NamedTensor], *, version: str | None, report: SyncReport
    ) -> None:
        """See `SyncTransport`."""
        await check_before(self._gate, weights, self._engine, report)
        is_last_resort = self._gate.must_check_in_parts(weights, "at its end")
        # A stream that is cut as the last one was is compared with that one anyway.
        announced = self._gate.is_confirmed and bool(self._stream.cuts)
        ranks = RanksInStep(self._group)
        request = OpeningRequest(self._engine, version)
        with ExitStack() as stack:
            stack.callback(self._rest)
            shards = self._exchange.turn(weights, self._stream.cuts)
            session = ranks.attempt(lambda: stack.enter_context(self._new_session()))
            with report.stage("open"):
                self._open(session, request, ranks)
            turn = ArrangedTurn(self._arrangements)
            source: Export | ExchangedBuckets | None = None
            ahead: deque[_Prepared] = deque()
            if shards is not Turn.EXCHANGE:
                source, buckets = self._exported(weights, report, turn, announced)
                ahead = ranks.attempt(lambda: self._ahead(session, buckets)) or ahead
            with report.stage("open"):
                met = self._meet(session, request, ranks)
            if met:
                turn.settle(_joined(session).arrangements)
                if source is not None:
                    ranks.attempt(lambda: self._settle(ahead, turn, report))
                elif ranks.agree(met=self._exchange.holds(turn)):
                    source, buckets = self._exchanged(turn, report)
                else:  # an engine wants whole buckets
                    shards = Turn.FULL
                    source, buckets = self._exported(weights, report, turn, announced)
                every = chain(_emptied(ahead), buckets)
                ranks.attempt(lambda: self._send(_joined(session), every, report, ranks))
                ahead.clear()
                source.drain()
                if ranks.agree():
                    ranks.attempt(lambda: self._commit(_joined(session), report, ranks))
            if source is not None:
                source.drain()
            if ranks.error is not None and session is not None:
                session.abort(ranks.error)
            with report.stage("reply"):
                request.wait()
            ranks.attempt(request.result)
            ranks.agree()  # also after a failure: nobody leaves while an engine is still busy
        if ranks.error is not None:
            self._gate.forget()
            self._arrangements = None  # the next sync is whole
            raise WeightSyncError(ranks.error)
        if is_last_resort and isinstance(source, Export):
            announcement = Announcement.of(source.specs)
            answer = await ask_engine(self._engine, announcement)
            self._gate.settle(announcement, *answer, is_sent=True)
        self._gate.confirm()
        if shards is not Turn.EXCHANGE and self._exchange.can_learn(weights):
            known = None if self._in_place is not None else self._arrangements
            with report.stage("learn"):
                self._exchange.learn(weights, self._stream, known, shards)

    def _new_session(self) -> TrainerSession:
        return TrainerSession(self._sockets.endpoint(), self._settings, self._names, self._used)

    def _open(
        self, session: TrainerSession | None, request: OpeningRequest, ranks: RanksInStep
    ) -> None:
        """Gather the ranks' invitations and post them; all ranks join the gather."""
        invitation = b""
        if session is not None:
            # The engine's format wants a tensor; an empty one needs no memory to share.
            named = [(session.invitation, torch.empty(0, dtype=torch.uint8))]
            invitation = ranks.attempt(lambda: serialize_handles(named)) or b""
        gathered = self._group.gather(invitation)
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

    def _prepared(
        self, source: Export, report: SyncReport, turn: ArrangedTurn, *, announced: bool
    ) -> Iterator[_Prepared]:
        """Export the buckets, and pack those that cannot be read in place.

        A bucket takes the staging buffer of the one `num_buffers` before it.
        """
        in_place = () if self._in_place is None else self._in_place.indices
        self._ring.prepare(self._stream.cuts, turn=turn, in_place=in_place)
        for batch in self._stream.batches(source, report, announced=announced):
            located = None if self._in_place is None else self._in_place.locate(batch)
            if located is not None:
                self._wait_for_export()
                report.num_in_place += 1
                # The engine reads the tensors themselves: they must live until it is done.
                yield _Prepared(batch, located)
                del batch
                continue
            if self._watch is not None:
                self._watch.see(batch)
            packed = self._packed(batch, turn, report)
            del batch
            yield packed
            del packed

    def _exported(
        self,
        weights: Iterable[NamedTensor],
        report: SyncReport,
        turn: ArrangedTurn,
        announced: bool,
    ) -> tuple[Export, Iterator[_Prepared]]:
        """The buckets of the full export."""
        source = self._gate.export(weights, compared=not announced)
        return source, self._prepared(source, report, turn, announced=announced)

    def _exchanged(
        self, turn: ArrangedTurn, report: SyncReport
    ) -> tuple[ExchangedBuckets, Iterator[_Prepared]]:
        """The buckets out of the ranks' shards."""
        source = self._exchange.buckets(self._stream.cuts, turn, self._ring, report)
        return source, (_exchanged(bucket, turn.digest) for bucket in source)

    def _packed(self, batch: Batch, turn: ArrangedTurn, report: SyncReport) -> _Prepared:
        """Pack a bucket, arranged where that was announced."""
        arrangement = turn.of(batch.index, batch.bucket)
        with report.stage("pack"):
            if arrangement is None:
                storage = self._ring.pack(batch)
            else:
                storage = self._ring.pack_arranged(batch, arrangement)
        report.staging_bytes = max(report.staging_bytes, self._ring.nbytes)
        if arrangement is None:
            return _Prepared(replace(batch, tensors=[]), storage=storage)
        if turn.is_settled:
            batch = replace(batch, tensors=[])
        return _Prepared(batch, storage=storage, arranged=turn.digest, nbytes=arrangement.nbytes)

    def _ahead(
        self, session: TrainerSession | None, buckets: Iterator[_Prepared]
    ) -> deque[_Prepared]:
        """While the engine joins: buckets in place, as many as are ready by then, or one packed."""
        ahead: deque[_Prepared] = deque()
        for bucket in buckets:
            ahead.append(bucket)
            if bucket.storage is not None or _joined(session).has_arrived():
                break
        return ahead

    def _settle(self, ahead: deque[_Prepared], turn: ArrangedTurn, report: SyncReport) -> None:
        """A bucket may have been packed before the engine said how it may come."""
        if ahead and ahead[-1].arranged:
            last = ahead.pop()
            if last.arranged == turn.digest:
                ahead.append(replace(last, batch=replace(last.batch, tensors=[])))
            else:
                ahead.append(self._packed(last.batch, turn, report))

    def _wait_for_export(self) -> None:
        """The tensors may still be being written; what writes them is ordered before this stream.

        Where nothing is pending the driver is not asked: it would wait for its turn on a GPU that
        the engine's copies keep busy.
        """
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            if not stream.query():
                stream.synchronize()

    def _send(
        self,
        session: TrainerSession,
        buckets: Iterable[_Prepared],
        report: SyncReport,
        ranks: RanksInStep,
    ) -> None:
        """Send every bucket; returns when the engine has read them all.

        What is read in place needs no buffer, so that nothing is waited for.
        """
        in_flight: deque[_Prepared] = deque()
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
            while packed and packed[0] <= index + 1 - self._ring.num_buffers:
                with report.stage("load"):
                    session.wait_until_done(packed[0])
                while in_flight and in_flight[0].batch.index <= packed[0]:
                    in_flight.popleft()
                packed.popleft()
        while in_flight:
            with report.stage("load"):
                session.wait_until_done(in_flight.popleft().batch.index)
        if not ranks.num_buckets:
            raise ValueError("the trainer exported no tensor")

    def _pieces(self, session: TrainerSession, bucket: _Prepared) -> list[BucketPiece]:
        """Where the engine finds the bucket; blocks that it does not know are mapped."""
        if bucket.storage is not None:
            keep = self._settings.keep_staging_buffers
            slot = session.map_buffer(bucket.storage, keep=keep)
            nbytes = bucket.nbytes or bucket.batch.bucket.layout.nbytes
            return [BucketPiece(slot, 0, 0, nbytes)]
        assert bucket.located is not None, "a bucket is packed or in place"
        return session.map_located(bucket.located, bucket.batch.tensors)

    def _commit(self, session: TrainerSession, report: SyncReport, ranks: RanksInStep) -> None:
        with report.stage("commit"):
            outcome = session.commit(
                num_buckets=ranks.num_buckets,
                num_tensors=ranks.num_tensors,
                arrangements=self._known_digest(),
            )
        report.num_replayed, report.num_eager = outcome.num_replayed, outcome.num_eager
        report.eager_reason = outcome.reason
        self._choose_source(outcome, session.read_in_place)
        if outcome.arrangements is not None:
            self._learn(outcome.arrangements)

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
        except ManifestError as error:
            self._wants_arrangements = False
            logger.warning(
                "buckets are sent whole, the engine's arrangements do not fit: %s", error
            )
            return
        self._ring.free()  # its buffers have room for whole buckets

    def _choose_source(self, outcome: Committed, used: frozenset[str]) -> None:
        """After a good sync: can the next ones be read in place?"""
        before, self._used = self._used, used
        if used and before and not used & before:
            logger.info("the trainer's weights move between syncs: they are packed from now on")
            self._in_place = None
        watch, self._watch = self._watch, None
        if watch is not None and outcome.may_read_in_place:
            self._in_place = watch.finish()
            if self._in_place is not None:
                self._ring.free()

    def _rest(self) -> None:
        self._exchange.free()
        if not self._settings.keep_staging_buffers:
            self._ring.free()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # what the engine has let go of


@dataclass(frozen=True)
class _Prepared:
    """A bucket that can be loaded.

    Attributes:
        batch: with its tensors where they are read in place, or may have to be packed again.
        located: where they lie.
        storage: the staging buffer; None where the tensors are read in place.
        arranged: digest of the arrangements by which it is packed; "": it is whole.
        nbytes: of the arranged buffer; 0 where the bucket is whole.
    """

    batch: Batch
    located: LocatedBucket | None = None
    storage: torch.UntypedStorage | None = None
    arranged: str = ""
    nbytes: int = 0


def _exchanged(bucket: ExchangedBucket, digest: str) -> _Prepared:
    batch = Batch(bucket.index, bucket.bucket, [])
    if bucket.arrangement is None:
        return _Prepared(batch, storage=bucket.storage)
    nbytes = bucket.arrangement.nbytes
    return _Prepared(batch, storage=bucket.storage, arranged=digest, nbytes=nbytes)


def _emptied(buckets: deque[_Prepared]) -> Iterator[_Prepared]:
    """Each once, and no longer held."""
    while buckets:
        yield buckets.popleft()


def _joined(session: TrainerSession | None) -> TrainerSession:
    assert session is not None, "a rank without a session has failed"
    return session
