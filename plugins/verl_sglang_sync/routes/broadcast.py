"""Delivery to engines on other devices, over a process group: buckets are announced, then sent.

Each engine has two buffers, and reports the buckets that it receives and has loaded:

    trainer   pack 0 | pack 1 | pack 2          | pack 3     |
    group              send 0 | send 1 | send 2     |
    engines                     load 0 | load 1     |

A transfer begins only when all engines receive its bucket. An earlier transfer would wait for the
engines on the GPU. Operations of the trainer that wait for the whole GPU, such as freeing memory or
the set-up of collectives, might then wait for ever.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from sglang_loader.common.broadcast.broadcast import POLL_S, Broadcast, BroadcastError, Transfer
from sglang_loader.common.ranks import Ranks
from sglang_loader.common.session.messages import PeerLost
from verl_sglang_sync.engine.engine_ranks import EngineRank, poll
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.export import Delivery, ReadyBucket
from verl_sglang_sync.routes.route import Poll
from verl_sglang_sync.trainer_ranks import AGREE_EVERY_S

NUM_TRAVELLING = 2
"""The number of buckets, or of rounds, in transfer at a time, each in its own memory."""

REASON_WAIT_S = 2.0
"""The time to wait after a failed transfer for the reason from the engine at fault."""


class GroupDelivery(Delivery):
    """Base of the deliveries over a process group. Subclasses announce and send the buckets.

    Args:
        engines: all engine ranks of the group on the first trainer rank, none on the other ranks.
        limit_s: longest time without progress, in seconds.
        poll: waits together with all trainer ranks that send.
        report: records the seconds of the stages "load", and "pack" or "send".
    """

    def __init__(
        self, engines: Sequence[EngineRank], limit_s: float, poll: Poll, report: SyncReport
    ) -> None:
        self._engines = engines
        self._limit_s = limit_s
        self._poll_ranks = poll
        self._report = report
        self._travelling: deque[tuple[int, Transfer]] = deque()

    def _wait(self, num_receiving: int) -> None:
        """Wait until all engines receive this many buckets and another transfer may begin."""
        # The limit is for each step, so a sync of any length may pass.
        deadline = time.monotonic() + self._limit_s

        def is_ready() -> bool | None:
            pause = time.monotonic() + AGREE_EVERY_S
            while True:
                poll(self._engines)
                waiting = [
                    engine
                    for engine in self._engines
                    if engine.session.num_receiving < num_receiving
                ]
                if not waiting and self._has_room():
                    return True
                if time.monotonic() > deadline:
                    self._raise_late(waiting)
                if time.monotonic() > pause:
                    return None
                time.sleep(POLL_S)

        self._poll_ranks(is_ready)

    def _raise_late(self, waiting: Sequence[EngineRank]) -> NoReturn:
        within = f"within {self._limit_s:g} s"
        for engine in waiting:
            with engine.naming_errors():
                raise PeerLost(f"no message from the engine {within}")
        raise BroadcastError(f"bucket {self._travelling[0][0]} was not sent {within}")

    def _has_room(self) -> bool:
        """Return True if another transfer may begin.

        Raises:
            Exception: a transfer has failed. The error is the engine's reason if the engine reports
                one in time, else the error of the transfer.
        """
        while self._travelling:
            index, transfer = self._travelling[0]
            try:
                if not transfer.is_done():
                    break
            except BroadcastError as error:
                self._await_reason()
                raise BroadcastError(f"bucket {index} was not sent: {error}") from None
            self._travelling.popleft()
        return len(self._travelling) < NUM_TRAVELLING

    def _await_reason(self) -> None:
        deadline = time.monotonic() + REASON_WAIT_S
        while self._engines and time.monotonic() < deadline:
            poll(self._engines)
            time.sleep(POLL_S)


class BroadcastDelivery(GroupDelivery):
    """Delivery of packed buckets by broadcasts from rank 0 of a group to all engines.

    Args:
        group: torch's process group.
    """

    def __init__(
        self, engines: Sequence[EngineRank], group: Any, limit_s: float, report: SyncReport
    ) -> None:
        super().__init__(engines, limit_s, Ranks().poll, report)
        self._group = group

    def deliver(self, ready: ReadyBucket) -> None:
        """Announce a bucket, and broadcast the bucket as soon as all engines receive."""
        index, bucket = ready.index, ready.bucket
        for engine in self._engines:
            with engine.naming_errors():
                engine.session.load(index, bucket, slot=0)
        with self._report.stage("load"):
            self._wait(index + 1)
        assert ready.storage is not None, "a broadcast bucket is packed"
        flat = torch.empty(0, dtype=torch.uint8, device=ready.storage.device).set_(ready.storage)
        self._travelling.append((index, Broadcast(flat[: bucket.layout.nbytes], self._group)))

    def make_room(self) -> None:
        """Wait until the staging buffer for the next bucket has been sent."""
        with self._report.stage("send"):
            self._wait(0)
