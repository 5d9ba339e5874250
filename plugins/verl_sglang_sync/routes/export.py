"""verl's full export, packed into staging buffers: the first sync, and what no route carries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain, islice

from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.route import ReadyBucket, SyncSource
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.sources.bucket_cutter import BucketCutter
from verl_sglang_sync.sources.comparison import Comparison
from verl_sglang_sync.sources.export import Export


@dataclass(eq=False)
class ExportedBuckets(SyncSource):
    """The full export, packed; a bucket takes the staging buffer of the one `num_buffers` before.

    Attributes:
        ring: None where no engine is given any bucket: the export is gone through, as the other
            ranks' collectives need it.
        comparison: of the export with the parameters, each bucket while the engine loads the one
            before; None: no route wants it.
    """

    export: Export
    cutter: BucketCutter
    ring: StagingRing | None
    report: SyncReport
    _: KW_ONLY
    asks_for_arrangements: bool
    comparison: Comparison | None = None

    def __post_init__(self) -> None:
        self._buckets = self._packed()

    def start(self) -> None:
        self._buckets = chain([*islice(self._buckets, 1)], self._buckets)

    def __iter__(self) -> Iterator[ReadyBucket]:
        return self._buckets

    def drain(self) -> None:
        """Go on exporting: the export's collectives need every rank."""
        self._buckets = iter(())
        self.export.drain()

    def _packed(self) -> Iterator[ReadyBucket]:
        """The export, cut. A rank that cannot allocate its buffers fails once it has exported the
        first bucket: the other ranks are in the collectives of that, too.
        """
        batches = self.cutter.batches(self.export, self.report)
        try:
            if self.ring is not None:
                self.ring.prepare([bucket.layout.nbytes for bucket in self.cutter.buckets])
        except Exception:
            next(batches, None)
            raise
        for batch in batches:
            ready = ReadyBucket(batch.index, batch.bucket)
            if self.ring is not None:
                with self.report.stage("pack"):
                    storage = self.ring.pack(batch)
                ready = replace(ready, storage=storage, nbytes=batch.bucket.layout.nbytes)
                held = self.ring.nbytes
                self.report.staging_bytes = max(self.report.staging_bytes, held)
            if self.comparison is not None:
                with self.report.stage("learn"):
                    self.comparison.add(batch.named)
            del batch
            yield ready
