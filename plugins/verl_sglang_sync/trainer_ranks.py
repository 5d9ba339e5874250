"""The ranks of a trainer in a sync, and what they raise together.

They meet on the CPU, in a gloo group of their own with the sync's time limit: torch's default group
may wait for half an hour for a rank that was killed. If a collective fails, each rank drops the
group and writes to torch's store that it is alive. `RankLost` names the ranks that do not write.
The next collective forms a new group, numbered in the store, so that a rank that has missed some
finds the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo
from torch.distributed.distributed_c10d import _get_default_store

from sglang_loader.common.broadcast.update_group import CONNECT_TRIES, meet
from sglang_loader.common.object_gather import gather_objects
from sglang_loader.common.ranks import Ranks, RanksFailed, Turn
from sglang_loader.common.threads import in_thread

AGREE_EVERY_S = 0.5
"""Longest wait of a rank for its engine before it meets the other ranks, which may have failed."""
MARGIN_S = 2.0
"""Added to the time limit, so that a rank can report a silent engine before the others time out."""
INTERRUPT_S = 5.0
"""Longest wait of an interrupted rank for the others, to end their sync, before it leaves."""
ROLL_CALL_S = 2.0
"""Longest wait of the survivors of a failed collective for each other's sign of life."""
CONNECT_S = 60.0
"""Longest wait for the connection to another rank that is in the store."""
STORE_LOST = "the rank that serves torch's store (rank 0 as a rule)"


class WeightSyncError(RanksFailed):
    """A sync failed, on all trainer ranks. The engines may hold incomplete weights."""


class CopiesDiffer(WeightSyncError):
    """The trainer's ranks hold different copies of one model. The message names them."""


class RankLost(WeightSyncError):
    """A trainer rank did not take part in a collective. The message names the rank."""

    is_alone = True


_ids = count()


class TrainerRanks(Ranks):
    """All ranks of torch's default group.

    Args:
        timeout_s: how long a rank waits for the others in one collective, in seconds.
        tp_mesh: one-dimensional device mesh of the ranks that share this replica (verl's
            "infer_tp"), the first of which is its leader. None: this rank has a replica alone.
    """

    def __init__(self, *, timeout_s: float = 600.0, tp_mesh: Any = None) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        own = [own_rank()] if tp_mesh is None else tp_mesh.mesh.tolist()
        self.replica_ranks = tuple(own)
        self._group: Any = None
        self._id = next(_ids)
        self._number = 0
        self._roll_call: Future[list[int]] | None = None

    def _failed(self, text: str, failures: Sequence[str]) -> RanksFailed:
        return WeightSyncError(f"weight sync failed\n{text}", failures)

    def check(self, error: BaseException | None = None) -> None:
        is_interrupt = error is not None and not isinstance(error, Exception)
        if is_interrupt and self._group is not None:
            self._group.set_timeout(timedelta(seconds=INTERRUPT_S))
        try:
            super().check(error)
        finally:
            if is_interrupt and self._group is not None:
                self._set_limit(self._group)

    def _begin_turn(self) -> None:
        if world_size() == 1 or self._group is not None:
            return
        if self._roll_call is not None and not self._roll_call.done():
            raise RankLost(f"weight sync failed: {STORE_LOST} still does not answer")
        with self._naming_lost():
            self._group = self._new_group()
        # Ranks that have missed a sync have counted other sections.
        self._section = 0

    def _exchange(self, turn: Turn) -> list[Turn]:
        if world_size() == 1:
            return [turn]

        def all_gather(rows: list[torch.Tensor], own: torch.Tensor) -> None:
            self._group.allgather([rows], [own]).wait()

        with self._naming_lost():
            return gather_objects(turn, world_size(), all_gather)

    @contextmanager
    def _naming_lost(self) -> Iterator[None]:
        """Raise RankLost for a failure of the group."""
        try:
            yield
        # gloo and the store raise RuntimeErrors. After a MemoryError this rank leaves the group,
        # too: its next collective would not be the one that the others are in.
        except (RuntimeError, MemoryError) as error:
            self._group = None
            lost = self._call_roll() or "a rank that has come back since"
            raise RankLost(
                f"weight sync failed: {lost} did not answer the other trainer ranks within "
                f"{self._timeout_s:g} s, or has ended\nrank {dist.get_rank()}: {error}"
            ) from None

    def _set_limit(self, group: Any) -> None:
        group.set_timeout(timedelta(seconds=self._timeout_s + MARGIN_S))

    def _new_group(self) -> Any:
        """Make a new group. Wait until all ranks have come."""
        store = self._store()
        while store.add(f"lost/{self._number}", 0):
            self._number += 1
        limit = timedelta(seconds=self._timeout_s + MARGIN_S)
        store, size = PrefixStore(str(self._number), store), dist.get_world_size()
        meet(store, size, limit)
        connect_s = max(MARGIN_S, min(self._timeout_s, CONNECT_S) / CONNECT_TRIES)
        group = ProcessGroupGloo(store, dist.get_rank(), size, timedelta(seconds=connect_s))
        self._set_limit(group)
        return group

    def _call_roll(self) -> str:
        """End the group of this number for all ranks, and wait for their signs of life.

        Returns:
            The ranks that give no sign of life, in words, or "" if all do.
        """

        def roll_call(_: object) -> list[int]:
            store = self._store()
            store.add(f"lost/{self._number}", 1)
            keys = {rank: f"alive/{self._number}/{rank}" for rank in range(dist.get_world_size())}
            store.set(keys.pop(dist.get_rank()), "")
            deadline = time.monotonic() + ROLL_CALL_S
            while keys and time.monotonic() < deadline:
                keys = {rank: key for rank, key in keys.items() if not store.check([key])}
                time.sleep(0.02)
            return list(keys)

        # A store that is served by a stopped process never answers: ask it in a thread.
        self._roll_call = in_thread(roll_call, "weight-sync-roll-call")
        try:
            missing = self._roll_call.result(2 * ROLL_CALL_S)
        except (TimeoutError, RuntimeError):
            return STORE_LOST
        return ", ".join(f"rank {rank}" for rank in missing)

    def _store(self) -> PrefixStore:
        """Return torch's store with keys of these ranks only."""
        # All ranks make their objects in one order, so that the ids are the same.
        return PrefixStore(f"weight_sync/{self._id}", _get_default_store())


async def run_on_all(ranks: Ranks, stage: str, work: Coroutine[Any, Any, None] | None) -> None:
    """Run this rank's part of a stage of the engines, and wait until all ranks have done theirs.

    Args:
        stage: its name, for the error.
        work: this rank's part. None: it has none.

    Raises:
        WeightSyncError: on every rank, if one failed.
    """
    task = asyncio.ensure_future(asyncio.sleep(0) if work is None else work)
    try:
        with ranks.section():
            # The ranks meet every `AGREE_EVERY_S` while they wait for their engines, so that no
            # rank times out, and none waits for one that is gone.
            while True:
                await asyncio.wait((task,), timeout=AGREE_EVERY_S)
                if is_done := task.done():
                    task.result()
                if ranks.all(is_done):
                    return
    except RankLost:
        raise
    except RanksFailed as error:
        text = f"stage {stage!r} failed\n" + "\n".join(error.failures)
        raise WeightSyncError(text, error.failures) from error.__cause__
    finally:
        task.cancel()


def world_size() -> int:
    """Return the number of ranks in torch's default group, or 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_rank() -> int:
    """Return this process's rank in torch's default group, or 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0
