"""Delivery of buckets that all trainer ranks send, in step with each other.

For each all-to-all the ranks agree once: every engine rank receives it, and the one before the last
has left, whose scratch this one is packed in. So nobody waits within a collective for a rank that
has failed, and a rank that is stopped is missed by the others' next agreement.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from sglang_loader.common.broadcast.broadcast import POLL_S, BroadcastError, Transfer
from sglang_loader.common.session.messages import SessionError
from verl_sglang_sync.collective import STEP_S
from verl_sglang_sync.engine.engine_ranks import EngineRank, look_at
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.broadcast import hear_reason
from verl_sglang_sync.routes.exchange.all_to_all import NUM_TRAVELLING
from verl_sglang_sync.routes.exchange.exchange_plan import Received
from verl_sglang_sync.routes.exchange.shard_route import ShardPlan
from verl_sglang_sync.routes.route import InStep, ReadyBucket


class SendDelivery:
    """See `Delivery`.

    Args:
        plan: what this rank sends.
        found: by bucket, then by engine rank, how that finds it; on the first rank.
        engines: all engine ranks, on the first rank; none on the others.
        group: the process group of all trainer ranks and engine ranks.
        device: of the shards.
        limit_s: longest time in which nothing gets on, in seconds.
        in_step: agrees with the other trainer ranks.
        report: gets the seconds of "load" and "pack".
    """

    def __init__(
        self,
        plan: ShardPlan,
        found: Sequence[Sequence[Received]],
        engines: Sequence[EngineRank],
        group: Any,
        device: torch.device,
        limit_s: float,
        in_step: InStep,
        report: SyncReport,
    ) -> None:
        self._plan = plan
        self._found = found
        self._engines = engines
        self._group = group
        self._device = device
        self._limit_s = limit_s
        self._in_step = in_step
        self._report = report
        self._num_ranks = plan.first_reader + len(plan.known)
        self._travelling: deque[Transfer] = deque()

    def deliver(self, ready: ReadyBucket) -> bool:
        """Announce a bucket, and send it as soon as all engine ranks receive it."""
        for reader, engine in enumerate(self._engines):
            found = self._found[ready.index][reader]
            with engine.naming():
                engine.session.load(
                    ready.index,
                    ready.bucket,
                    found.pieces,
                    read_only=False,
                    arranged=self._plan.is_arranged(reader, ready.index),
                    receives=found.sizes,
                )
        for number in self._plan.all_to_all.numbers_of(ready.index):
            with self._report.stage("load"):
                if not self._may_start(ready.index):
                    return False
            with self._report.stage("pack"):
                self._start(number)
        return True

    def make_room(self) -> None:
        """See `Delivery`: nothing, what is sent is packed when there is room."""

    def _start(self, number: int) -> None:
        try:
            self._plan.all_to_all.pack(number)
        finally:  # without these bytes the other ranks would hang: that they fail is agreed later
            nothing = torch.empty(0, dtype=torch.uint8, device=self._device)
            sizes = [0] * self._num_ranks
            work = self._plan.all_to_all.launch(number, nothing, sizes, self._group)
            self._travelling.append(Transfer(work, self._device))

    def _may_start(self, index: int) -> bool:
        """Wait, all trainer ranks in step, until all engines receive a bucket and there is room.

        Returns:
            False if a rank has failed.
        """
        deadline = time.monotonic() + self._limit_s

        def may_start() -> bool:
            pause = time.monotonic() + STEP_S
            while True:
                look_at(self._engines)
                waiting = [e for e in self._engines if e.session.num_receiving <= index]
                if not waiting and self._has_room():
                    return True
                if time.monotonic() > deadline:
                    self._raise_late(index, waiting)
                if time.monotonic() > pause:
                    return False
                time.sleep(POLL_S)

        return self._in_step(may_start)

    def _raise_late(self, index: int, waiting: Sequence[EngineRank]) -> NoReturn:
        within = f"within {self._limit_s:g} s"
        for engine in waiting:
            with engine.naming():
                raise SessionError(f"no message from the engine {within}")
        raise BroadcastError(f"what was to leave before bucket {index} has not left {within}")

    def _has_room(self) -> bool:
        """True if there is scratch for one more; a rank that makes a transfer fail may say why."""
        try:
            while self._travelling and self._travelling[0].is_done():
                self._travelling.popleft()
        except BroadcastError:
            hear_reason(self._engines)
            raise
        return len(self._travelling) < NUM_TRAVELLING
