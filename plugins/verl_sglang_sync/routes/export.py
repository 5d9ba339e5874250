"""The source of an exported sync: verl's full export, packed into staging buffers.

The first sync is exported, and every sync for which no route can be used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain, islice

import torch

from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.route import Sending, SyncSource
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.sources.bucket_cutter import Bucket, BucketCutter
from verl_sglang_sync.sources.comparison import Comparison
from verl_sglang_sync.sources.export import Export


@dataclass(frozen=True)
class ReadyBucket:
    """A packed bucket of an export.

    Attributes:
        index: position in the sync, from 0.
        storage: the staging buffer that the bucket begins in. None on a rank without engines.
    """

    index: int
    bucket: Bucket
    storage: torch.UntypedStorage | None = None


class Delivery:
    """The delivery of ready buckets to the engine ranks of one trainer rank, in one sync.

    Both methods raise the errors of a session, with the name of the engine rank.
    """

    def deliver(self, ready: ReadyBucket) -> None:
        """Request the engine ranks to load the next bucket."""
        raise NotImplementedError

    def make_room(self) -> None:
        """Wait until the staging buffer for the next bucket is free, if that bucket needs one."""


@dataclass(eq=False)
class ExportedBuckets(SyncSource):
    """The full export, packed into staging buffers that are used in turn.

    Attributes:
        ring: the staging buffers. None if this rank delivers to no engine. Such a rank still
            iterates the export, because the collectives of the export need every rank.
        delivery: takes the packed buckets to the engine ranks.
        comparison: compares the export with the parameters. The engine loads the same bucket at
            that time. None if no route can learn from the export.
        frees_ring: the buffers are freed after the sync, for the engine's KV cache.
        compares_buckets: the comparison is of the buckets. False if the export is quantised: then
            `export` adds the tensors to the comparison before that.
    """

    export: Export
    cutter: BucketCutter
    ring: StagingRing | None
    report: SyncReport
    _: KW_ONLY
    delivery: Delivery
    frees_ring: bool
    comparison: Comparison | None = None
    compares_buckets: bool = False

    def __post_init__(self) -> None:
        self._buckets = self._packed()

    def start(self) -> None:
        # Packs the first bucket while the engines join, and puts the bucket back in front.
        self._buckets = chain([*islice(self._buckets, 1)], self._buckets)

    def send(self, sessions: Sending) -> None:
        for ready in self._buckets:
            self.delivery.deliver(ready)
            sessions.count(ready.bucket)

    def drain(self) -> None:
        """Iterate the rest of the export, because its collectives need every rank."""
        # Nothing more is packed. Only the export runs on.
        self._buckets = iter(())
        self.export.drain()

    def close(self) -> None:
        if self.frees_ring and self.ring is not None:
            self.ring.free()

    def _packed(self) -> Iterator[ReadyBucket]:
        """Yield the buckets of the export, packed if this rank has staging buffers."""
        batches = self.cutter.batches(self.export, self.report)
        try:
            if self.ring is not None:
                self.ring.prepare([bucket.layout.nbytes for bucket in self.cutter.buckets])
        except Exception:
            # The other ranks are in the collectives of the first bucket, which need this rank.
            next(batches, None)
            raise
        for batch in batches:
            ready = ReadyBucket(batch.index, batch.bucket)
            if self.ring is not None:
                with self.report.stage("pack"):
                    storage = self.ring.pack(batch)
                ready = replace(ready, storage=storage)
                held = self.ring.nbytes
                self.report.staging_bytes = max(self.report.staging_bytes, held)
            compared = batch if self.compares_buckets else None
            del batch
            yield ready
            if compared is not None:
                assert self.comparison is not None, "it has one that compares buckets"
                with self.report.stage("learn"):
                    self.comparison.add(compared.named)
            del compared  # frees the memory of its tensors for the next bucket's
            if not ready.bucket.is_last:
                self.delivery.make_room()
