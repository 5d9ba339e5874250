"""Where the buckets of one sync come from: of the full export, of the ranks' shards, or pulled.

A source is chosen before the engine has joined, the same on all ranks, and used in this order:

    source.start(session.has_arrived)      # while the engine joins
    source.engine_joined(session.arrangements)  # the engine has said how buckets may come
    source.map_memory(session)             # what the engine reads, where it is known beforehand
    for bucket in source: ...              # each is loaded
    source.confirm()                       # before the engines may publish
    source.drain()                         # in any case: no other rank waits for this one
    source.end()                           # after a good sync

`ExportedBuckets` packs verl's full export. `ExchangedBuckets` (`routes.exchange`) fills the same
staging buffers from the ranks' shards. `PulledBuckets` packs nothing: see `pull`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from sglang_loader.common.session.messages import BucketPiece
from verl_sglang_sync.engine.session import TrainerSession
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.arranged_sending import ArrangedSync
from verl_sglang_sync.routes.pull import Pull
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.sources.bucket_stream import Batch, Bucket, BucketStream
from verl_sglang_sync.sources.export import Export, NamedTensor


@dataclass(frozen=True)
class ReadyBucket:
    """A bucket that can be loaded.

    Attributes:
        index: position in the sync, from 0.
        bucket: what it is.
        storage: the staging buffer that holds it; None where it is pulled.
        arranged: digest of the arrangements by which it is packed; "": it is whole.
        nbytes: of what is packed.
        pieces: where the trainer ranks' parameters hold it; None where it is packed.
    """

    index: int
    bucket: Bucket
    storage: torch.UntypedStorage | None = None
    arranged: str = ""
    nbytes: int = 0
    pieces: list[BucketPiece] | None = None


class SyncSource(Protocol):
    """The buckets of one sync of one trainer rank; see the module.

    Attributes:
        is_export: True: it goes through the full export.
        is_packed: True: buckets lie in staging buffers, and may hold only what the engine reads.
    """

    is_export: bool
    is_packed: bool

    def start(self, has_arrived: Callable[[], bool]) -> None:
        """Do what can be done while the engine joins, until it has."""

    def engine_joined(self, held: str) -> None:
        """The engine holds arrangements of this digest for the sync; "": none."""

    def map_memory(self, session: TrainerSession) -> None:
        """Have the engine map, with the first bucket, what all buckets need."""

    def __iter__(self) -> Iterator[ReadyBucket]: ...

    def confirm(self) -> None:
        """Raise unless the buckets are what the export gives."""

    def drain(self) -> None:
        """Take part in what other ranks still need."""

    def end(self) -> None:
        """The sync was good."""


class ExportedBuckets:
    """The full export, packed; a bucket takes the staging buffer of the one `num_buffers` before.

    Args:
        export: of this sync.
        stream: cuts it.
        ring: the staging buffers.
        arranged: which buckets hold only what this rank's engine reads.
        report: gets the counts and seconds.
    """

    is_export = is_packed = True

    def __init__(
        self,
        export: Export,
        stream: BucketStream,
        ring: StagingRing,
        arranged: ArrangedSync,
        report: SyncReport,
    ) -> None:
        self._export = export
        self._ring = ring
        self._arranged = arranged
        self._report = report
        ring.prepare(stream.cuts, arranged=arranged)
        self._batches = stream.batches(export, report)
        self._first: ReadyBucket | None = None
        self._first_batch: Batch | None = None

    def start(self, has_arrived: Callable[[], bool]) -> None:
        """Pack the first bucket; if it is arranged, `engine_joined` may need its tensors again."""
        batch = next(self._batches, None)
        if batch is not None:
            self._first = self._packed(batch)
            self._first_batch = batch if self._first.arranged else None

    def engine_joined(self, held: str) -> None:
        """See `SyncSource`; the first bucket may have to be packed again."""
        self._arranged.keep_if_held(held)
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

    def map_memory(self, session: TrainerSession) -> None:
        """Nothing to do: staging buffers are mapped with the buckets in them."""

    def confirm(self) -> None:
        """Nothing to do: every tensor came from the export."""

    def end(self) -> None:
        """Nothing to do."""

    def drain(self) -> None:
        """Go on exporting: the export's collectives need every rank."""
        self._first = self._first_batch = None
        self._export.drain()

    def _packed(self, batch: Batch) -> ReadyBucket:
        arrangement = self._arranged.of(batch.index, batch.bucket)
        with self._report.stage("pack"):
            if arrangement is None:
                storage, nbytes = self._ring.pack(batch), batch.bucket.layout.nbytes
            else:
                storage, nbytes = self._ring.pack_arranged(batch, arrangement), arrangement.nbytes
        self._report.staging_bytes = max(self._report.staging_bytes, self._ring.nbytes)
        packed = ReadyBucket(batch.index, batch.bucket, storage=storage, nbytes=nbytes)
        return packed if arrangement is None else replace(packed, arranged=self._arranged.digest)


class PulledBuckets:
    """Buckets that lie in the trainer ranks' parameters.

    Args:
        pull: prepared.
        weights: the export that is left out.
        stream: how it would have been cut.
        device: of the parameters on this rank.
        report: gets the counts and seconds.
    """

    is_export = is_packed = False

    def __init__(
        self,
        pull: Pull,
        weights: Iterable[NamedTensor],
        stream: BucketStream,
        device: torch.device,
        report: SyncReport,
    ) -> None:
        self._pull = pull
        self._device = device
        self._report = report
        self._checks = pull.confirm(weights, stream.cuts)

    def start(self, has_arrived: Callable[[], bool]) -> None:
        """Wait for what still writes the parameters: once all ranks have, any engine may read."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._check(until=has_arrived)

    def engine_joined(self, held: str) -> None:
        """Nothing to do: what an engine does not need it does not read."""

    def __iter__(self) -> Iterator[ReadyBucket]:
        for index, pulled in enumerate(self._pull.buckets(self._report)):
            yield ReadyBucket(index, pulled.bucket, pieces=pulled.pieces)

    def confirm(self) -> None:
        """The parameters are where the engines were told to read them."""
        self._check()

    def drain(self) -> None:
        """Nothing to do: no rank waits for an export."""

    def map_memory(self, session: TrainerSession) -> None:
        """The parameters of all ranks."""
        session.map_blocks(self._pull.blocks, keep=self._pull.keeps_mappings)

    def end(self) -> None:
        """The engines have mapped what they were to map."""
        self._pull.end()

    def _check(self, until: Callable[[], bool] = lambda: False) -> None:
        with self._report.stage("confirm"):
            for _ in self._checks:
                if until():
                    break
