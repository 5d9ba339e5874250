"""verl's full export, packed into staging buffers: the first sync, and what no route carries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sglang_loader.common.session.messages import BucketPiece
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.arrangements import ArrangedSync
from verl_sglang_sync.engine.engine_ranks import EngineRank, wait_for
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.route import ReadyBucket, SyncSource
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.sources.bucket_stream import Batch, BucketStream
from verl_sglang_sync.sources.export import Export


class ExportedBuckets(SyncSource):
    """The full export, packed; a bucket takes the staging buffer of the one `num_buffers` before.

    Args:
        ring: None where no engine is given any bucket: the export is gone through, as the other
            ranks' collectives need it.
        arranged: which buckets hold only what this rank's engine reads.
    """

    def __init__(
        self,
        export: Export,
        stream: BucketStream,
        ring: StagingRing | None,
        arranged: ArrangedSync,
        report: SyncReport,
    ) -> None:
        self._export = export
        self._ring = ring
        self._arranged = arranged
        self._report = report
        self._batches = self._all_batches(stream)
        self._first: ReadyBucket | None = None
        self._first_batch: Batch | None = None

    def start(self) -> None:
        """Pack the first bucket; if it is arranged, `engines_joined` may need its tensors again."""
        batch = next(self._batches, None)
        if batch is not None:
            self._first = self._packed(batch)
            self._first_batch = batch if self._first.arranged else None

    def engines_joined(self, held: Sequence[str]) -> None:
        """See `SyncSource`; the first bucket may have to be packed again."""
        self._arranged.keep_if_held(next(iter(held), ""))
        batch, self._first_batch = self._first_batch, None
        if batch is not None and self._arranged.digest == "":
            self._first = self._packed(batch)

    def __iter__(self) -> Iterator[ReadyBucket]:
        first, self._first = self._first, None
        if first is not None:
            yield first
        for batch in self._batches:
            packed = self._packed(batch)
            del batch
            yield packed

    def drain(self) -> None:
        """Go on exporting: the export's collectives need every rank."""
        self._first = self._first_batch = None
        self._export.drain()

    def _all_batches(self, stream: BucketStream) -> Iterator[Batch]:
        """The export, cut. A rank that cannot allocate its buffers fails once it has exported the
        first bucket: the other ranks are in the collectives of that, too.
        """
        expected, batches = self._arranged.expected, stream.batches(self._export, self._report)
        sizes = [(expected(i) or b.layout).nbytes for i, b in enumerate(stream.buckets)]
        try:
            if self._ring is not None:
                self._ring.prepare(sizes)
        except Exception:
            next(batches, None)
            raise
        yield from batches

    def _packed(self, batch: Batch) -> ReadyBucket:
        if self._ring is None:
            return ReadyBucket(batch.index, batch.bucket)
        arrangement = self._arranged.of(batch.index, batch.bucket)
        with self._report.stage("pack"):
            if arrangement is None:
                storage, nbytes = self._ring.pack(batch), batch.bucket.layout.nbytes
            else:
                storage, nbytes = self._ring.pack_arranged(batch, arrangement), arrangement.nbytes
        self._report.staging_bytes = max(self._report.staging_bytes, self._ring.nbytes)
        packed = ReadyBucket(batch.index, batch.bucket, storage=storage, nbytes=nbytes)
        return packed if arrangement is None else replace(packed, arranged=self._arranged.digest)


class MappedDelivery:
    """See `Delivery`: the staging buffers of packed buckets are mapped, in which they take turns.
    Without engines (one on a colocated rank) buckets get nowhere.
    """

    def __init__(
        self,
        engines: Sequence[EngineRank],
        settings: WeightSyncConfig,
        num_buffers: int,
        report: SyncReport,
    ) -> None:
        self._engines = engines
        self._settings = settings
        self._num_buffers = num_buffers
        self._report = report
        self._num_packed = 0

    def deliver(self, ready: ReadyBucket) -> bool:
        """See `Delivery`; a staging buffer that an engine does not know is mapped."""
        self._num_packed += 1
        for session in (engine.session for engine in self._engines):
            assert ready.storage is not None, "a rank with an engine packs"
            slot = session.map_buffer(ready.storage, keep=self._settings.keep_staging_buffers)
            pieces = [BucketPiece(slot, 0, 0, ready.nbytes)]
            session.load(
                ready.index, ready.bucket, pieces, read_only=False, arranged=ready.arranged
            )
        return True

    def make_room(self) -> None:
        num_read = self._num_packed + 1 - self._num_buffers
        if num_read > 0 and self._engines:
            with self._report.stage("load"):
                wait_for(
                    self._engines,
                    lambda session: session.num_done >= num_read,
                    self._settings.request_timeout_s,
                )
