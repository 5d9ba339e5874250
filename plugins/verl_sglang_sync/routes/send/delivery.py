"""Delivery of buckets that all trainer ranks send, in step with each other.

Before each all-to-all the ranks agree that every engine rank receives it, and that the one before
the last, whose scratch it is packed in, is done. So no rank waits in a collective for one that has
failed, and a rank that hangs is found in the next agreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_loader.common.broadcast.broadcast import Transfer
from sglang_loader.common.session.messages import encode_pieces
from verl_sglang_sync.engine.engine_ranks import EngineRank
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.broadcast import GroupDelivery
from verl_sglang_sync.routes.route import InStep, ReadyBucket
from verl_sglang_sync.routes.shards.exchange_plan import Received
from verl_sglang_sync.routes.shards.shard_route import ShardPlan


class SendDelivery(GroupDelivery):
    """Sends buckets by the all-to-alls of a `ShardPlan`.

    Args:
        plan: what this rank sends.
        found: on the first rank, by bucket and engine rank, where that finds the bucket.
        group: the process group of all trainer ranks and engine ranks.
        device: device of the shards.
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
        super().__init__(engines, limit_s, in_step, report)
        self._plan = plan
        self._found = found
        self._group = group
        self._nothing = torch.empty(0, dtype=torch.uint8, device=device)
        self._num_ranks = plan.first_reader + len(plan.all_arrangements)

    def deliver(self, ready: ReadyBucket) -> bool:
        """Announce a bucket, and send it as soon as all engine ranks receive it."""
        for reader, engine in enumerate(self._engines):
            found = self._found[ready.index][reader]
            with engine.naming():
                engine.session.load(
                    ready.index,
                    ready.bucket,
                    encode_pieces(found.pieces),
                    read_only=False,
                    arranged=self._plan.is_arranged(reader, ready.index),
                    receives=found.sizes,
                )
        for number in self._plan.all_to_all.numbers_of(ready.index):
            with self._report.stage("load"):
                if not self._wait(ready.index + 1):
                    return False
            with self._report.stage("pack"):
                self._start(number, ready.index)
        return True

    def make_room(self) -> None:
        """Do nothing: `deliver` waits for room before it packs."""

    def _start(self, number: int, index: int) -> None:
        moves, nothing = self._plan.all_to_all, self._nothing
        try:
            moves.pack(number)
        finally:  # also after a failure, which is agreed on later: the other ranks would hang
            work = moves.launch(number, nothing, [0] * self._num_ranks, self._group)
            self._travelling.append((index, Transfer(work, nothing.device)))
