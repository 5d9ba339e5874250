"""Mode "compiled": one request opens a session on all ranks, buckets go straight to the engine.

Every trainer rank has a session of its own with the engine rank on its device, so ranks are not in
step within a sync; they agree three times: everyone has joined, everyone has sent the same, every
replica is done. A rank that fails in between goes on exporting (the export's collectives need
it), then all leave together with the same `WeightSyncError`.
"""

from __future__ import annotations

import asyncio
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

import torch

from sglang_loader.bucket_loader import SESSION_LOADER
from sglang_loader.ipc import serialize_handles
from sglang_loader.session_messages import Committed, SessionError
from sglang_loader.update_keys import UpdateKeys
from verl_sglang_sync.bucket_stream import Batch, BucketStream
from verl_sglang_sync.collective import RoundState, TrainerGroup
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.manifest_gate import Announcement, ManifestGate
from verl_sglang_sync.packing import NamedTensor
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.session_staging import StagingRing
from verl_sglang_sync.source import SourceWatch, in_place_cuts
from verl_sglang_sync.trainer_session import BufferNames, SocketFolder, TrainerSession
from verl_sglang_sync.transport import Updater, ask_engine, check_before
from verl_sglang_sync.weight_sync import Export, WeightSyncError

Result = TypeVar("Result")

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
        self._names = BufferNames()
        self._watch = SourceWatch(device) if settings.read_in_place else None
        self._gate = ManifestGate(settings.manifest_check, group.agree)
        self._is_announced = False
        # Something to share with the request that opens a session: the engine's format wants it.
        self._token = torch.zeros(1, dtype=torch.uint8, device=device)

    async def sync(
        self, weights: Iterable[NamedTensor], *, version: str | None, report: SyncReport
    ) -> None:
        """See `SyncTransport`."""
        await check_before(self._gate, weights, self._engine, report)
        is_last_resort = self._gate.must_check_in_parts(weights, "at its end")
        # A stream that is cut as the last one was is compared with that one anyway.
        self._is_announced = self._gate.is_confirmed and bool(self._stream.cuts)
        source = self._gate.export(weights, compared=not self._is_announced)
        ranks = _Ranks(self._group)
        request = _Request(self._engine, version)
        with ExitStack() as stack:
            stack.callback(self._rest)
            session = ranks.attempt(lambda: stack.enter_context(self._new_session()))
            self._open(session, request, ranks)
            if self._meet(session, request, ranks):
                ranks.attempt(lambda: self._send(_joined(session), source, report, ranks))
                _drain(source)
                if ranks.agree():
                    ranks.attempt(lambda: self._commit(_joined(session), report, ranks))
            _drain(source)
            if ranks.error is not None and session is not None:
                session.abort(ranks.error)
            with report.stage("load"):
                request.wait()
            ranks.attempt(request.result)
            ranks.agree()  # also after a failure: nobody leaves while an engine is still busy
        if ranks.error is not None:
            self._gate.forget()
            raise WeightSyncError(ranks.error)
        if is_last_resort:
            announcement = Announcement.of(source.specs)
            answer = await ask_engine(self._engine, announcement)
            self._gate.settle(announcement, *answer, is_sent=True)
        self._gate.confirm()

    def _new_session(self) -> TrainerSession:
        return TrainerSession(self._sockets.endpoint(), self._settings, self._names)

    def _open(self, session: TrainerSession | None, request: _Request, ranks: _Ranks) -> None:
        """Gather the ranks' invitations and post them; all ranks join the gather."""
        invitation = b""
        if session is not None:
            named = [(session.invitation, self._token)]
            invitation = ranks.attempt(lambda: serialize_handles(named)) or b""
        gathered = self._group.gather(invitation)
        if gathered is not None and all(gathered):
            ranks.attempt(lambda: request.post(gathered))

    def _meet(self, session: TrainerSession | None, request: _Request, ranks: _Ranks) -> bool:
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

    def _send(
        self, session: TrainerSession, source: Export, report: SyncReport, ranks: _Ranks
    ) -> None:
        """Export, pack and send every bucket; returns when the engine has read them all."""
        self._ring.prepare(self._stream.cuts)
        in_flight: deque[Batch] = deque()
        for batch in self._stream.batches(source, report, announced=self._is_announced):
            if len(in_flight) == self._ring.num_buffers:
                with report.stage("load"):
                    session.wait_until_done(in_flight.popleft().index)
            storage = self._readable_storage(batch, report)
            session.load(
                batch.index,
                batch.bucket,
                slot=session.map(storage),
                offset=batch.start or 0,
                read_only=batch.start is not None,
            )
            ranks.sent(batch)
            # The engine reads the tensors of an unpacked bucket: they must live until it is done.
            in_flight.append(replace(batch, tensors=[]) if batch.start is None else batch)
            del batch
        with report.stage("load"):
            while in_flight:
                session.wait_until_done(in_flight.popleft().index)
        if not ranks.num_buckets:
            raise ValueError("the trainer exported no tensor")

    def _readable_storage(self, batch: Batch, report: SyncReport) -> torch.UntypedStorage:
        """The storage where the engine finds the bucket: packed now, or the trainer's own."""
        if batch.start is not None:
            report.num_in_place += 1
            return batch.tensors[0].untyped_storage()
        if self._watch is not None:
            self._watch.see(batch)
        with report.stage("pack"):
            storage = self._ring.pack(batch)
        report.staging_bytes = max(report.staging_bytes, self._ring.nbytes)
        return storage

    def _commit(self, session: TrainerSession, report: SyncReport, ranks: _Ranks) -> None:
        with report.stage("load"):
            outcome = session.commit(num_buckets=ranks.num_buckets, num_tensors=ranks.num_tensors)
        report.num_replayed, report.num_eager = outcome.num_replayed, outcome.num_eager
        report.eager_reason = outcome.reason
        self._choose_source(outcome)

    def _choose_source(self, outcome: Committed) -> None:
        """After the first good sync: can the next ones be read in place?"""
        watch, self._watch = self._watch, None
        if watch is None or not outcome.may_read_in_place:
            return
        cuts = in_place_cuts(self._stream.cuts, watch.places(), self._settings.bucket_bytes)
        if cuts is not None:
            self._stream.use(cuts)
            self._ring.free()

    def _rest(self) -> None:
        if not self._settings.keep_staging_buffers:
            self._ring.free()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # what the engine has let go of


def _joined(session: TrainerSession | None) -> TrainerSession:
    assert session is not None, "a rank without a session has failed"
    return session


class _Request:
    """The update request, posted from a thread: this one waits on the session's socket."""

    def __init__(self, engine: Updater | None, version: str | None) -> None:
        self._engine = engine
        self._version = version
        self._reply: Future[None] | None = None

    def post(self, handles: list[bytes]) -> None:
        """Send the request; its reply is the outcome on all TP ranks."""
        engine = self._engine
        assert engine is not None, "only the leader gathers handles"

        async def update() -> None:
            await engine.update_weights(
                handles,
                load_format=SESSION_LOADER,
                flush_cache=True,
                weight_version=self._version,
                key=next(UpdateKeys()),
            )

        thread = ThreadPoolExecutor(1, thread_name_prefix="weight-sync-request")
        self._reply = thread.submit(lambda: asyncio.run(update()))
        thread.shutdown(wait=False)

    def check(self) -> None:
        """Raise if the engine has answered already: nobody is left to talk to."""
        if self._reply is not None and self._reply.done():
            self._reply.result()
            raise SessionError("the engine ended the update before its session")

    def wait(self) -> None:
        """Wait until there is a reply, good or bad."""
        if self._reply is not None:
            wait([self._reply])

    def result(self) -> None:
        """Raise what went wrong on the engine's side."""
        if self._reply is not None:
            self._reply.result()


class _Ranks:
    """This rank's success so far, and what all ranks agreed on.

    Attributes:
        error: the message that all ranks raise; None while all is well.
        num_buckets: sent by this rank in this sync.
        num_tensors: likewise.
    """

    def __init__(self, group: TrainerGroup) -> None:
        self.error: str | None = None
        self._group = group
        self._failure: str | None = None
        self.num_buckets = self.num_tensors = 0
        self._checksum = 0

    def attempt(self, step: Callable[[], Result]) -> Result | None:
        """Run a step unless this rank has failed; keep the traceback if it fails now."""
        if self._failure is not None:
            return None
        try:
            return step()
        except Exception:
            self._failure = traceback.format_exc()
            return None

    def sent(self, batch: Batch) -> None:
        """Count a bucket into what the ranks compare."""
        self.num_buckets += 1
        self.num_tensors += len(batch.tensors)
        self._checksum = zlib.crc32(batch.bucket.names, self._checksum)

    def agree(self, *, met: bool = True) -> bool:
        """Exchange states and checksums with all ranks; False if the sync cannot go on.

        Args:
            met: False: this rank still waits for its engine; then all ranks must ask again.
        """
        state = RoundState.END if self._failure is None else RoundState.FAILED
        if not met and self._failure is None:
            state = RoundState.BUCKET
        signature = self.num_tensors << 32 | self._checksum
        result = self._group.agree(state, self._failure, signature)
        if self.error is not None:
            return False
        if result.failures:
            reasons = "\n".join(result.failures)
            self.error = f"weight sync failed; the engine's weights are incomplete\n{reasons}"
        elif len(set(result.signatures)) > 1:
            self.error = (
                "weight sync failed: the ranks exported different tensors; by rank, number: "
                f"{[signature >> 32 for signature in result.signatures]}, checksum of their "
                f"names: {[signature & 0xFFFFFFFF for signature in result.signatures]}"
            )
        return self.error is None and RoundState.BUCKET not in result.states


def _drain(source: Export) -> None:
    """Run the export to its end: its collectives need every rank, unless it is what broke."""
    if not source.failed:
        source.drain()
