"""verl's full export, packed into staging buffers: the first sync, and what no route carries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice

from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.route import ReadyBucket, SyncSource
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.sources.bucket_stream import BucketStream
from verl_sglang_sync.sources.comparison import Comparison
from verl_sglang_sync.sources.export import Export


class ExportedBuckets(SyncSource):
    """The full export, packed; a bucket takes the staging buffer of the one `num_buffers` before.

    Args:
        ring: None where no engine is given any bucket: the export is gone through, as the other
            ranks' collectives need it.
        comparison: of the export with the parameters, each bucket while the engine loads the one
            before; None: no route wants it.
    """

    def __init__(
        self,
        export: Export,
        stream: BucketStream,
        ring: StagingRing | None,
        report: SyncReport,
        *,
        asks_for_reads: bool,
        comparison: Comparison | None = None,
    ) -> None:
        self.asks_for_reads = asks_for_reads
        self.comparison = comparison
        self._export = export
        self._ring = ring
        self._report = report
        self._buckets: Iterator[ReadyBucket] = self._packed(stream)

    def start(self) -> None:
        self._buckets = chain([*islice(self._buckets, 1)], self._buckets)

    def __iter__(self) -> Iterator[ReadyBucket]:
        return self._buckets

    def drain(self) -> None:
        """Go on exporting: the export's collectives need every rank."""
        self._buckets = iter(())
        self._export.drain()

    def _packed(self, stream: BucketStream) -> Iterator[ReadyBucket]:
        """The export, cut. A rank that cannot allocate its buffers fails once it has exported the
        first bucket: the other ranks are in the collectives of that, too.
        """
        batches = stream.batches(self._export, self._report)
        try:
            if self._ring is not None:
                self._ring.prepare([bucket.layout.nbytes for bucket in stream.buckets])
        except Exception:
            next(batches, None)
            raise
        for batch in batches:
            ready = ReadyBucket(batch.index, batch.bucket)
            if self._ring is not None:
                with self._report.stage("pack"):
                    storage = self._ring.pack(batch)
                ready = replace(ready, storage=storage, nbytes=batch.bucket.layout.nbytes)
                held = self._ring.nbytes
                self._report.staging_bytes = max(self._report.staging_bytes, held)
            if self.comparison is not None:
                with self._report.stage("learn"):
                    self.comparison.add(batch.named)
            del batch
            yield ready
