"""Collectives of a sync: the trainer's ranks agree on outcomes, or exchange small objects.

They run on the CPU, in a gloo group of their own with the sync's time limit: torch's default group
may wait for half an hour for a rank that was killed. After a failure the group is destroyed, so
that every rank that waits in it notices, and each rank writes to torch's store that it is alive:
those that do not are named in `RankLost`. The next collective forms a new group, numbered in the
store, so that a rank that has missed some finds the others.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo
from torch.distributed.distributed_c10d import _get_default_store

from sglang_loader.common.broadcast.update_group import CONNECT_TRIES, meet
from sglang_loader.common.object_gather import gather_objects
from sglang_loader.common.threads import in_thread

Result = TypeVar("Result")

AGREE_EVERY_S = 0.5
"""How long a rank waits for its engine before it tells the other ranks that it still waits."""
MARGIN_S = 2.0
"""Added to the time limit, so that a rank can report a silent engine before the others time out."""
ROLL_CALL_S = 2.0
"""How long the survivors of a failed collective wait for each other's sign of life."""
CONNECT_S = 60.0
"""Longest wait for the connection to another rank that is in the store."""
STORE_LOST = "the rank that serves torch's store (rank 0 as a rule)"


class WeightSyncError(RuntimeError):
    """A sync failed; the engine's weights are partly overwritten and must not be used."""


class ReplicasDiffer(WeightSyncError):
    """The trainer's ranks hold different copies of one model; the message names them."""


@dataclass(frozen=True)
class Reason:
    """The reason against a fast way of a sync.

    Attributes:
        text: for the log.
        is_final: trying again cannot help. False: the error may pass, such as a lack of memory.
    """

    text: str
    is_final: bool

    def __str__(self) -> str:
        return self.text


class RankLost(WeightSyncError):
    """A trainer rank did not take part in a collective; the message names it."""


@dataclass(frozen=True)
class Agreement:
    """The outcomes of all ranks; the same object on every rank.

    Attributes:
        failures: "rank R: traceback" of every rank that failed.
        is_ready: no rank has failed, and all ranks are ready.
        signatures: by rank.
    """

    failures: tuple[str, ...] = ()
    is_ready: bool = True
    signatures: tuple[object, ...] = ()


class TrainerGroup:
    """The ranks of a trainer, which all make the same calls in the same order.

    This class is for a trainer of one rank, as in scripts; `TorchTrainerGroup` for many.
    """

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """The ranks that share this rank's rollout replica."""
        return (0,)

    def agree(
        self, failure: str | None = None, *, is_ready: bool = True, signature: object = None
    ) -> Agreement:
        """Exchange outcomes with every trainer rank.

        Args:
            failure: this rank's traceback, or None.
            is_ready: False: this rank needs more time, and all must agree again later.
            signature: of this rank, for the caller to compare with those of the others.

        Raises:
            RankLost: a rank is gone, or did not come within the limit.
        """
        outcomes = self.all_gather((failure, is_ready, signature))
        texts, ready, signatures = zip(*outcomes, strict=True)
        failures = tuple(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
        return Agreement(failures, not failures and all(ready), signatures)

    def gather(self, item: bytes) -> list[bytes] | None:
        """The items of this replica's TP ranks on its leader; None on the other ranks."""
        return [item]

    def all_gather(self, item: Any) -> list[Any]:
        """The items of all ranks, by rank. Raises as `agree`."""
        return [item]

    def begin(self) -> None:
        """Begin a sync or another stage, which ranks that have left earlier ones take part in."""

    def leave(self, reason: str) -> None:
        """Leave the collective that the other ranks are in, or will come to: they raise `RankLost`
        at once, with this rank's `reason`. All ranks meet again in the next stage.
        """


_ids = count()


class TorchTrainerGroup(TrainerGroup):
    """All ranks of torch's default group.

    Args:
        timeout_s: how long a rank waits for the others in one collective, in seconds.
        tp_mesh: one-dimensional device mesh of the ranks that share this replica (verl's
            "infer_tp"), the first of which is its leader; None if `gather` is not used.
    """

    def __init__(self, *, timeout_s: float, tp_mesh: Any = None) -> None:
        self._timeout_s = timeout_s
        self._tp_ranks: list[int] = [] if tp_mesh is None else tp_mesh.mesh.tolist()
        self._group: Any = None
        self._id = next(_ids)
        self._number = 0
        self._num_stages = 0  # that were begun
        self._is_at_beginning = True  # of a stage: no rank has answered another in it
        self._roll_call: Future[list[int]] | None = None

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        return tuple(self._tp_ranks)

    def gather(self, item: bytes) -> list[bytes] | None:
        items = self.all_gather(item)
        is_leader = dist.get_rank() == self._tp_ranks[0]
        return [items[rank] for rank in self._tp_ranks] if is_leader else None

    def all_gather(self, item: Any) -> list[Any]:
        if self._roll_call is not None and not self._roll_call.done():
            raise RankLost(f"weight sync failed: {STORE_LOST} still does not answer")

        def all_gather(rows: list[torch.Tensor], own: torch.Tensor) -> None:
            self._group.allgather([rows], [own]).wait()

        try:
            if self._group is None:
                self._group = self._new_group()
            gathered = gather_objects(item, dist.get_world_size(), all_gather)
            self._is_at_beginning = False
            return gathered
        # gloo and the store raise RuntimeErrors. After a MemoryError this rank leaves the group,
        # too: its next collective would not be the one that the others are in.
        except (RuntimeError, MemoryError) as error:
            self._group = None
            missing, left = self._call_roll()
            is_older = bool(left) and all(stage < self._num_stages for stage, _ in left)
            if is_older and not missing and self._is_at_beginning:
                self._is_at_beginning = False
                return self.all_gather(item)  # a rank has left at the end of the stage before
            if left and not missing:
                reasons = "\n".join(reason for _, reason in left)
                raise RankLost(f"weight sync failed\n{reasons}") from None
            lost = missing or "a rank that has come back since"
            raise RankLost(
                f"weight sync failed: {lost} did not answer the other trainer ranks within "
                f"{self._timeout_s:g} s, or has ended\nrank {dist.get_rank()}: {error}"
            ) from None

    def begin(self) -> None:
        self._num_stages += 1
        self._is_at_beginning = True

    def leave(self, reason: str) -> None:
        if self._group is None:  # lost already, or no rank has met another yet
            return
        self._group = None  # closes its connections, at which the other ranks wait
        self._call_roll(reason)

    def _new_group(self) -> Any:
        """A new group; blocks until all ranks have come."""
        store = self._store()
        while store.add(f"lost/{self._number}", 0):
            self._number += 1
        limit = timedelta(seconds=self._timeout_s + MARGIN_S)
        store, size = PrefixStore(str(self._number), store), dist.get_world_size()
        meet(store, size, limit)
        connect_s = max(MARGIN_S, min(self._timeout_s, CONNECT_S) / CONNECT_TRIES)
        group = ProcessGroupGloo(store, dist.get_rank(), size, timedelta(seconds=connect_s))
        group.set_timeout(limit)
        return group

    def _call_roll(self, reason: str | None = None) -> tuple[str, list[tuple[int, str]]]:
        """End the group of this number for all ranks, and wait for their signs of life. In a
        thread, since a store that is served by a stopped process never answers.

        Args:
            reason: this rank has left the group by itself, for this reason.

        Returns:
            The ranks that give no sign of life, in words, "" if all do; and of those that have left
            by themselves the number of the stage, and the reason with the rank.
        """
        size, left = dist.get_world_size(), list[tuple[int, str]]()

        def roll_call(_: object) -> list[int]:
            store = self._store()
            if reason is not None:
                own = f"left/{self._number}/{dist.get_rank()}"
                store.set(own, f"{self._num_stages} {reason}")
            store.add(f"lost/{self._number}", 1)
            keys = {rank: f"alive/{self._number}/{rank}" for rank in range(dist.get_world_size())}
            store.set(keys.pop(dist.get_rank()), "")
            deadline = time.monotonic() + ROLL_CALL_S
            while keys and time.monotonic() < deadline:
                keys = {rank: key for rank, key in keys.items() if not store.check([key])}
                time.sleep(0.02)
            for rank in range(size):
                if store.check([key := f"left/{self._number}/{rank}"]):
                    stage, _, text = store.get(key).decode().partition(" ")
                    left.append((int(stage), f"rank {rank}: {text}"))
            return list(keys)

        self._roll_call = in_thread(roll_call, "weight-sync-roll-call")
        try:
            missing = self._roll_call.result(2 * ROLL_CALL_S)
        except (TimeoutError, RuntimeError):
            return STORE_LOST, []
        return ", ".join(f"rank {rank}" for rank in missing), left

    def _store(self) -> PrefixStore:
        """Torch's store with keys of this group only; all ranks make groups in the same order."""
        return PrefixStore(f"weight_sync/{self._id}", _get_default_store())


async def run_in_step(
    group: TrainerGroup, stage: str, work: Coroutine[Any, Any, None] | None
) -> None:
    """Do this rank's part of a stage, and wait until all ranks have done theirs; collective.

    Ranks agree every `AGREE_EVERY_S` while they wait for their engines, so that no rank times out,
    and none waits for one that is gone.

    Args:
        stage: its name, for the error.
        work: this rank's part; None if it has none.

    Raises:
        WeightSyncError: on every rank, if it failed on any.
    """
    task = asyncio.ensure_future(asyncio.sleep(0) if work is None else work)
    group.begin()
    try:
        while True:
            failure = None
            is_done = bool((await asyncio.wait((task,), timeout=AGREE_EVERY_S))[0])
            if is_done and (error := task.exception()) is not None:
                failure = "".join(traceback.format_exception(error))
            result = group.agree(failure, is_ready=is_done)
            if result.failures:
                raise WeightSyncError(f"stage {stage!r} failed\n" + "\n".join(result.failures))
            if result.is_ready:
                return
    except WeightSyncError:
        raise
    except BaseException as error:  # of this rank alone: an interrupt, or a cancelled task
        group.leave(f"stage {stage!r}: {error!r}")
        raise
    finally:
        task.cancel()


def holds_everywhere(group: TrainerGroup, holds: bool) -> bool:
    return group.agree(is_ready=holds).is_ready


def result_or_reason(
    step: Callable[[], Result],
    *final: type[Exception],
    passing: tuple[type[Exception], ...] = (),
) -> tuple[Result | None, Reason | None]:
    """A step's result and None, or None and the error as a reason, for the other ranks.

    Args:
        step: must not be collective.
        final: errors of which the message is enough, and which trying again cannot help.
        passing: errors of which the message is enough, and which may pass. Any other error may
            pass, too, and its reason has the traceback.
    """
    try:
        return step(), None
    except final as error:
        return None, Reason(str(error), is_final=True)
    except passing as error:
        return None, Reason(str(error), is_final=False)
    except Exception:
        return None, Reason(traceback.format_exc(), is_final=False)


def common_reason(group: TrainerGroup, reason: Reason | None) -> Reason | None:
    """All ranks' reasons against something, as one; None if there is no reason; collective."""
    gathered: list[Reason | None] = group.all_gather(reason)
    texts = [f"rank {rank}: {each}" for rank, each in enumerate(gathered) if each is not None]
    is_final = any(each is not None and each.is_final for each in gathered)
    return Reason("; ".join(texts), is_final) if texts else None


def world_size() -> int:
    """Number of ranks in torch's default group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_rank() -> int:
    """This process's rank in torch's default group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0
