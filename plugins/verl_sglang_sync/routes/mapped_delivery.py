"""Delivery of exported buckets through staging buffers that the engine maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.engine_ranks import EngineRank, wait_for
from verl_sglang_sync.engine.session import TrainerSession
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.export import Delivery, ReadyBucket


@dataclass(eq=False)
class MappedDelivery(Delivery):
    """Delivery through staging buffers that engines map, and that buckets use in turn.

    A colocated rank has one engine rank. A rank that only takes part in the export has none.
    """

    _engines: Sequence[EngineRank]
    _settings: WeightSyncConfig
    _report: SyncReport
    _num_packed: int = field(default=0, init=False)

    def deliver(self, ready: ReadyBucket) -> None:
        """Request the engine ranks to load a bucket.

        If an engine rank has not mapped the staging buffer, the request carries its handle.
        """
        self._num_packed += 1
        for session in (engine.session for engine in self._engines):
            assert ready.storage is not None, "a rank with an engine has staging buffers"
            # The buffers are freed after a colocated sync, so engines must not keep them mapped.
            slot = session.map_buffer(ready.storage, keep=False)
            session.load(ready.index, ready.bucket, slot)

    def make_room(self) -> None:
        # The next bucket takes the buffer of an earlier bucket, which must have been read.
        num_read = self._num_packed + 1 - self._settings.num_staging_buffers

        def has_read(session: TrainerSession) -> bool:
            return session.num_done >= num_read

        if num_read > 0 and self._engines:
            with self._report.stage("load"):
                wait_for(self._engines, has_read, self._settings.request_timeout_s)
