"""Mode "compiled": has the buckets of an export ready to be loaded, where they lie or packed.

maker = BucketMaker(settings, device)
buckets = maker.exported(export, report, turn, announced=False)
ahead = maker.ahead(buckets, session.has_arrived)       # while the engine joins
maker.settle(ahead, turn, report)                       # the engine has said how they may come
...
maker.choose_source(outcome, used)                      # after a good sync
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from sglang_loader.session_messages import Committed
from verl_sglang_sync.arranged_sending import ArrangedTurn
from verl_sglang_sync.bucket_stream import Batch, BucketStream
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.session_staging import StagingRing
from verl_sglang_sync.source import Holders, InPlaceSource, LocatedBucket, SourceWatch
from verl_sglang_sync.weight_sync import Export

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadyBucket:
    """A bucket that can be loaded.

    Attributes:
        batch: with its tensors where they are read in place, or may have to be packed again.
        located: where they lie.
        holders: who holds that memory, where it is not the batch's own tensors.
        storage: the staging buffer; None where the tensors are read in place.
        arranged: digest of the arrangements by which it is packed; "": it is whole.
        nbytes: of the arranged buffer; 0 where the bucket is whole.
    """

    batch: Batch
    located: LocatedBucket | None = None
    holders: Holders | None = None
    storage: torch.UntypedStorage | None = None
    arranged: str = ""
    nbytes: int = 0


class BucketMaker:
    """Of one trainer rank, for all its sessions.

    Args:
        settings: the preset.
        device: of the engine's weights on this rank.

    Attributes:
        stream: cuts the export.
        ring: staging buffers.
        used: names of the blocks of the trainer's own memory that the last session read.
    """

    def __init__(self, settings: WeightSyncConfig, device: torch.device) -> None:
        self._device = device
        self.stream = BucketStream(settings.bucket_bytes)
        self.ring = StagingRing(
            device,
            num_buffers=settings.num_staging_buffers,
            bucket_bytes=settings.bucket_bytes,
        )
        self.used: frozenset[str] = frozenset()
        self._watch = SourceWatch(device) if settings.read_in_place else None
        self._in_place: InPlaceSource | None = None

    @property
    def in_place(self) -> InPlaceSource | None:
        """Where buckets are expected to lie; None if they are packed."""
        return self._in_place

    def exported(
        self, source: Export, report: SyncReport, turn: ArrangedTurn, *, announced: bool
    ) -> Iterator[ReadyBucket]:
        """Export the buckets, and pack those that cannot be read in place.

        A bucket takes the staging buffer of the one `num_buffers` before it.
        """
        in_place = () if self._in_place is None else self._in_place.indices
        self.ring.prepare(self.stream.cuts, turn=turn, in_place=in_place)
        for batch in self.stream.batches(source, report, announced=announced):
            located = None if self._in_place is None else self._in_place.locate(batch)
            if located is not None:
                wait_for_export(self._device)
                report.num_in_place += 1
                # The engine reads the tensors themselves: they must live until it is done.
                yield ReadyBucket(batch, located)
                del batch
                continue
            if self._watch is not None:
                self._watch.see(batch)
            packed = self._packed(batch, turn, report)
            del batch
            yield packed
            del packed

    def ahead(
        self, buckets: Iterator[ReadyBucket], has_arrived: Callable[[], bool]
    ) -> deque[ReadyBucket]:
        """While the engine joins: buckets in place, as many as are ready by then, or one packed."""
        ahead: deque[ReadyBucket] = deque()
        for bucket in buckets:
            ahead.append(bucket)
            if bucket.storage is not None or has_arrived():
                break
        return ahead

    def settle(self, ahead: deque[ReadyBucket], turn: ArrangedTurn, report: SyncReport) -> None:
        """A bucket may have been packed before the engine said how it may come."""
        if ahead and ahead[-1].arranged:
            last = ahead.pop()
            if last.arranged == turn.digest:
                ahead.append(replace(last, batch=replace(last.batch, tensors=[])))
            else:
                ahead.append(self._packed(last.batch, turn, report))

    def choose_source(self, outcome: Committed, used: frozenset[str]) -> None:
        """After a good sync: can the next ones be read in place?"""
        before, self.used = self.used, used
        if used and before and not used & before:
            logger.info("the trainer's weights move between syncs: they are packed from now on")
            self._in_place = None
        watch, self._watch = self._watch, None
        if watch is not None and outcome.may_read_in_place:
            self._in_place = watch.finish()
            if self._in_place is not None:
                self.ring.free()

    def _packed(self, batch: Batch, turn: ArrangedTurn, report: SyncReport) -> ReadyBucket:
        """Pack a bucket, arranged where that was announced."""
        arrangement = turn.of(batch.index, batch.bucket)
        with report.stage("pack"):
            if arrangement is None:
                storage = self.ring.pack(batch)
            else:
                storage = self.ring.pack_arranged(batch, arrangement)
        report.staging_bytes = max(report.staging_bytes, self.ring.nbytes)
        if arrangement is None:
            return ReadyBucket(replace(batch, tensors=[]), storage=storage)
        if turn.is_settled:
            batch = replace(batch, tensors=[])
        return ReadyBucket(batch, storage=storage, arranged=turn.digest, nbytes=arrangement.nbytes)


def wait_for_export(device: torch.device) -> None:
    """What is read in place may still be written, by work that is ordered before this stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def emptied(buckets: deque[ReadyBucket]) -> Iterator[ReadyBucket]:
    """Each once, and no longer held."""
    while buckets:
        yield buckets.popleft()
