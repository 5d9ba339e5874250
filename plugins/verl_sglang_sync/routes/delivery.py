"""Delivery of packed buckets to the engine ranks of one trainer rank, which map them."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_loader.common.session.messages import BucketPiece
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.engine_ranks import EngineRank, wait_for
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.route import ReadyBucket


class MappedDelivery:
    """See `Delivery`: the staging buffers of packed buckets are mapped.

    Args:
        engines: one on a colocated rank; none: buckets get nowhere.
        num_buffers: staging buffers, in which packed buckets take turns.
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
