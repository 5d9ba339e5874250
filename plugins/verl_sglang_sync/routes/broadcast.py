"""Delivery to engines on other devices: one rank broadcasts its packed buckets to all of them.

The engines, which have two buffers of their own, say which bucket they receive and which they have
read:

    trainer   pack 0 | pack 1 | pack 2          | pack 3     |
    group              send 0 | send 1 | send 2     |
    engines                     load 0 | load 1     |

A bucket's broadcast begins when all engines receive it, never earlier: on a GPU it would wait there
for the engines, and whatever of the trainer waits for the whole GPU meanwhile (freeing memory, its
own collectives' set-up) would wait for ever.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from sglang_loader.common.broadcast.broadcast import POLL_S, Broadcast, BroadcastError
from sglang_loader.common.session.messages import BucketPiece
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.engine_ranks import EngineRank, each, look_at, wait_for
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.route import ReadyBucket

NUM_BUFFERS = 2
REASON_WAIT_S = 2.0
"""How long after a failed broadcast the engine that is to blame may take to say why."""


class BroadcastDelivery:
    """See `Delivery`.

    Args:
        engines: all engine ranks of the group, but this rank.
        group: torch's process group; this is its rank 0.
    """

    def __init__(
        self,
        engines: Sequence[EngineRank],
        group: Any,
        settings: WeightSyncConfig,
        report: SyncReport,
    ) -> None:
        self._engines = engines
        self._group = group
        self._limit_s = settings.request_timeout_s
        self._report = report
        self._in_flight: deque[tuple[int, Broadcast]] = deque()

    def deliver(self, ready: ReadyBucket) -> bool:
        """Announce a bucket, and broadcast it as soon as all engines receive it."""
        index, bucket = ready.index, ready.bucket
        pieces = [BucketPiece(0, 0, 0, ready.nbytes)]
        each(self._engines, lambda e: e.session.load(index, bucket, pieces, read_only=False))
        with self._report.stage("load"):
            wait_for(self._engines, lambda session: session.num_receiving > index, self._limit_s)
        assert ready.storage is not None, "what is broadcast is packed"
        flat = torch.empty(0, dtype=torch.uint8, device=ready.storage.device).set_(ready.storage)
        self._in_flight.append((index, Broadcast(flat[: ready.nbytes], self._group)))
        return True

    def make_room(self) -> None:
        """Wait until the oldest bucket has been sent; an engine that makes it fail may say why."""
        if len(self._in_flight) < NUM_BUFFERS:
            return
        index, broadcast = self._in_flight.popleft()
        deadline = time.monotonic() + self._limit_s
        with self._report.stage("send"):
            try:
                while not broadcast.is_done():
                    look_at(self._engines)
                    if time.monotonic() > deadline:
                        raise BroadcastError(f"nothing within {self._limit_s:g} s")
                    time.sleep(POLL_S)
            except BroadcastError as error:
                hear_reason(self._engines)
                raise BroadcastError(f"bucket {index} was not sent: {error}") from None


def hear_reason(engines: Sequence[EngineRank]) -> None:
    """After a failed transfer: the engine that is to blame may say why."""
    deadline = time.monotonic() + REASON_WAIT_S
    while engines and time.monotonic() < deadline:
        look_at(engines)
        time.sleep(POLL_S)
