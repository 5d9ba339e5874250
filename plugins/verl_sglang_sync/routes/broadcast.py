"""Disaggregated mode: one rank packs the export and broadcasts it to all replicas.

Every trainer rank exports (that is collective). The first one packs buckets into two staging
buffers and broadcasts them. It has a session with each engine rank of each replica, opened by one
request a replica when the first bucket is packed; the engines, which have two buffers of their own,
say which they receive and which they have read:

    trainer   pack 0 | pack 1 | pack 2          | pack 3     |
    group              send 0 | send 1 | send 2     |
    engines                     load 0 | load 1     |

A bucket's broadcast begins when all engines receive it, never earlier: on a GPU it would wait there
for the engines, and whatever of the trainer waits for the whole GPU meanwhile (freeing memory, its
own collectives' set-up) would wait for ever.
"""

from __future__ import annotations

import logging
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from types import TracebackType
from typing import Any, TypeVar

import torch

from sglang_loader.common.broadcast.broadcast import POLL_S, Broadcast, BroadcastError
from sglang_loader.common.session.folder import remove_orphans
from sglang_loader.common.session.messages import SESSION_FORMAT, SessionError
from verl_sglang_sync.collective import Agreement, WeightSyncError, export_signature
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.server_client import ReplyLost, operations
from verl_sglang_sync.engine.session import (
    EngineFailed,
    TrainerSession,
    check_refused,
    check_unanswered,
)
from verl_sglang_sync.engine.update_groups import Replica, UpdateGroup, UpdateGroups
from verl_sglang_sync.report import SyncReport, log_remarks
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.sources.bucket_stream import Batch, BucketStream
from verl_sglang_sync.sources.export import Export, NamedTensor
from verl_sglang_sync.sources.memory_blocks import BlockNames

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

NUM_BUFFERS = 2
MEET_TIMEOUT_S = 120.0
REASON_WAIT_S = 2.0
"""How long after a failed broadcast the engine that is to blame may take to say why."""
GIVE_UP_S = 5.0
"""How long a failed sync waits for the replies, so that the engines are done when it is raised."""


class BroadcastTransport:
    """Sends syncs to the replicas; lives in every trainer process, for all its syncs.

    Args:
        groups: on the rank that broadcasts; None on the others.
        settings: the preset.
        agree: `TrainerGroup.agree`, over the trainer's ranks.
        device: of the staging buffers and of the group.
    """

    def __init__(
        self,
        *,
        groups: UpdateGroups | None,
        settings: WeightSyncConfig,
        agree: Callable[..., Agreement],
        device: torch.device,
    ) -> None:
        remove_orphans()  # as a session's trainer does when it makes a folder of its own
        self._groups = groups
        self._settings = settings
        self._agree = agree
        self._device = device
        self._stream = BucketStream(settings.bucket_bytes)
        self._ring = StagingRing(
            device, num_buffers=NUM_BUFFERS, bucket_bytes=settings.bucket_bytes
        )

    def sync(
        self,
        weights: Iterable[NamedTensor],
        replicas: Sequence[Replica],
        *,
        version: str | None,
        report: SyncReport,
    ) -> None:
        """Send all of `weights` to all `replicas`; every trainer rank calls this.

        Raises:
            WeightSyncError: on every rank, if any rank failed; the message has rank and traceback.
        """
        try:
            with ExitStack() as stack:
                self._sync(stack, weights, replicas, version, report)
        except BaseException:
            if self._groups is not None:
                self._groups.abandon()
            raise

    def _sync(
        self,
        stack: ExitStack,
        weights: Iterable[NamedTensor],
        replicas: Sequence[Replica],
        version: str | None,
        report: SyncReport,
    ) -> None:
        source, exported = Export(weights), _Exported()
        sync: _BroadcastSync | None = None
        failure = None
        try:
            if self._groups is not None:
                group = self._groups.with_replicas(replicas)
                sync = stack.enter_context(_BroadcastSync(group, self._settings, version, report))
                self._send(source, sync, report, exported)
            else:
                for name, tensor in source:
                    exported.add(_sum_of(name, 0 if tensor.is_meta else tensor.nbytes))
        except Exception:
            failure = traceback.format_exc()
        source.drain()
        result = self._agree(failure, signature=exported.signature)
        if not result.failures and result.other_exports is not None:
            result = Agreement((result.other_exports,))
        if sync is not None and not result.failures:
            try:
                sync.publish()
            except Exception:
                failure = traceback.format_exc()
        if not result.failures:
            result = self._agree(failure)
        if result.failures:
            reasons = "\n".join(result.failures)
            raise WeightSyncError(
                f"weight sync failed; the engines' weights are incomplete\n{reasons}"
            )

    def _send(
        self, source: Export, sync: _BroadcastSync, report: SyncReport, exported: _Exported
    ) -> None:
        """Send all buckets, and have all loaded."""
        self._ring.prepare([bucket.layout.nbytes for bucket in self._stream.buckets])
        for batch in self._stream.batches(source, report):
            for tensor in batch.bucket.layout.tensors:
                exported.add(_sum_of(tensor.name, tensor.nbytes))
            sync.make_room(batch.index)
            with report.stage("pack"):
                storage = self._ring.pack(batch)
            report.staging_bytes = max(report.staging_bytes, self._ring.nbytes)
            flat = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            sync.send(batch, flat[: batch.bucket.layout.nbytes])
            del batch
        sync.finish()


class _Exported:
    """Counts what a rank exported, in any order."""

    def __init__(self) -> None:
        self._num_tensors = self._checksum = 0

    def add(self, checksum: int) -> None:
        self._num_tensors += 1
        self._checksum = (self._checksum + checksum) & 0xFFFFFFFF

    @property
    def signature(self) -> int:
        return export_signature(self._num_tensors, self._checksum)


@lru_cache(maxsize=1 << 18)
def _sum_of(name: str, nbytes: int) -> int:
    """Of a tensor's name and size; the same every sync."""
    return zlib.crc32(f"{name} {nbytes}".encode())


@dataclass(frozen=True)
class _Engine:
    """One engine rank, as the trainer speaks with it.

    Attributes:
        name: for messages.
        session: its session.
        reply: to the request by which its replica was asked for that.
    """

    name: str
    session: TrainerSession
    reply: Future[Any]

    def check(self) -> None:
        """Raise if the replica has answered: its engine ranks are at the session no more."""
        check_unanswered(self.reply)


class _BroadcastSync:
    """One sync: its sessions, and the broadcasts in flight. A context manager."""

    def __init__(
        self,
        group: UpdateGroup,
        settings: WeightSyncConfig,
        version: str | None,
        report: SyncReport,
    ) -> None:
        self._group = group
        self._settings = settings
        self._version = version
        self._report = report
        self._stack = ExitStack()
        self._engines: list[_Engine] = []
        self._broadcasts: list[Broadcast] = []
        self._num_tensors = 0

    def _open(self) -> None:
        """Ask every replica for a session with each of its engine ranks, which then serve nobody
        else, and wait until all have joined.
        """
        sockets = iter(self._group.sockets)
        for replica, client in self._group.members:
            sessions = [
                self._stack.enter_context(
                    TrainerSession(
                        next(sockets),
                        self._settings,
                        BlockNames(),
                        group=self._group.name,
                        secret=self._group.secret,
                    )
                )
                for _ in range(replica.num_ranks)
            ]
            reply = client.submit(
                operations.update_weights(
                    [session.invitation for session in sessions],
                    load_format=SESSION_FORMAT,
                    flush_cache=True,
                    weight_version=self._version,
                )
            )
            for rank, session in enumerate(sessions):
                name = f"{replica.base_url}, TP rank {rank}"
                self._engines.append(_Engine(name, session, reply))
        limit_s = min(MEET_TIMEOUT_S, self._settings.request_timeout_s)
        deadline = time.monotonic() + limit_s
        for engine in self._engines:
            with _naming(engine):
                while not engine.session.greet(engine.check, wait_s=POLL_S):
                    if time.monotonic() > deadline:
                        raise SessionError(f"the engine did not join within {limit_s:g} s")

    def make_room(self, index: int) -> None:
        """Wait until the staging buffer of bucket `index` has been sent."""
        if index >= NUM_BUFFERS:
            with self._report.stage("send"):
                self._wait_for(index - NUM_BUFFERS)

    def send(self, batch: Batch, flat: torch.Tensor) -> None:
        """Announce a bucket, and broadcast it as soon as all engines receive it."""
        if not self._broadcasts:
            with self._report.stage("open"):
                self._open()
        self._num_tensors += len(batch.tensors)
        self._report.sent_bytes += batch.bucket.payload_bytes
        self._each(lambda session: session.load(batch.index, batch.bucket, [], read_only=False))
        with self._report.stage("load"):
            self._wait(
                lambda: all(e.session.num_receiving > batch.index for e in self._engines),
                f"bucket {batch.index} was not received",
            )
        self._broadcasts.append(Broadcast(flat, self._group.process_group))

    def finish(self) -> None:
        """Wait until every engine rank has loaded all buckets; none serves them yet."""
        num_buckets = len(self._broadcasts)
        if not num_buckets:
            raise ValueError("the trainer exported no tensor")
        with self._report.stage("load"):
            self._wait(
                lambda: all(e.session.num_done == num_buckets for e in self._engines),
                "not all buckets were loaded",
            )
            self._each(
                lambda session: session.finish(
                    num_buckets=num_buckets, num_tensors=self._num_tensors, arrangements=None
                )
            )
            outcomes = self._each(lambda session: session.outcome())
        if self._settings.uses_plan:
            least = min(outcomes, key=lambda outcome: outcome.num_replayed)
            self._report.num_replayed = least.num_replayed
            self._report.num_eager, self._report.eager_reason = least.num_eager, least.reason

    def publish(self) -> None:
        """Have the weights and their version served by all engines."""
        with self._report.stage("publish"):
            for engine in self._engines:
                with _naming(engine):
                    engine.session.commit(partial(check_refused, engine.reply))
            self._each(lambda session: session.wait_until_published())
        with self._report.stage("reply"):
            for reply in self._replies:
                try:
                    log_remarks(reply.result())
                except ReplyLost as error:
                    logger.warning("the weights were published, but a reply was lost: %s", error)
        for engine in self._engines:
            engine.session.keep_socket()

    @property
    def _replies(self) -> list[Future[Any]]:
        """One for each replica."""
        return list(dict.fromkeys(engine.reply for engine in self._engines))

    def _each(self, step: Callable[[TrainerSession], Result]) -> list[Result]:
        """Do something in every session."""
        results = []
        for engine in self._engines:
            with _naming(engine):
                results.append(step(engine.session))
        return results

    def _wait_for(self, index: int) -> None:
        """Wait until a bucket has been sent; an engine that makes it fail may say why."""
        try:
            self._wait(self._broadcasts[index].is_done, f"bucket {index} was not received")
        except BroadcastError as error:
            with suppress(TimeoutError):
                self._wait(lambda: False, "no engine has failed", REASON_WAIT_S)
            raise BroadcastError(f"bucket {index} was not sent: {error}") from None

    def _wait(self, is_over: Callable[[], bool], what: str, timeout_s: float | None = None) -> None:
        """Wait for the engines, as long as none of them fails: then it would never end.

        Raises:
            TimeoutError: it took longer than `timeout_s`, by default the request's.
            EngineFailed: names the engine.
        """
        limit_s = self._settings.request_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            for engine in self._engines:
                with _naming(engine):
                    engine.session.look()
                    engine.check()
            if is_over():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} within {limit_s:g} s")
            time.sleep(POLL_S)

    def __enter__(self) -> _BroadcastSync:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._stack:
            if exc_value is not None:
                self._abort(str(exc_value))
        # A gloo group ends with the last reference to it or a broadcast in it; engines wait for
        # that. The error of a reply that failed refers to the frames that have raised it, and they
        # to their callers, which have the group.
        for reply in self._replies:
            if reply.done() and not reply.cancelled() and (error := reply.exception()) is not None:
                error.with_traceback(None)
        self._broadcasts.clear()
        self._engines.clear()

    def _abort(self, reason: str) -> None:
        """Tell the engines to give up, and wait until they have, `GIVE_UP_S` at most."""
        for engine in self._engines:
            engine.session.abort(reason, engine.check)
        replies = self._replies
        for reply in wait(replies, min(GIVE_UP_S, self._settings.request_timeout_s)).not_done:
            reply.cancel()


@contextmanager
def _naming(engine: _Engine) -> Iterator[None]:
    """An error of the body says of which engine it is."""
    try:
        yield
    except Exception as error:
        raise EngineFailed(f"{engine.name}: {error}") from error
