"""The few collectives of a sync, on the CPU: agree on a round's outcome, gather handles."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import torch
import torch.distributed as dist


class RoundState(IntEnum):
    """What a rank brings to a round of the sync; the worst of all ranks decides."""

    BUCKET = 0
    END = 1
    FAILED = 2  # the rank can go on exporting
    EXPORT_FAILED = 3  # the rank's export died: nobody may wait for its collectives


@dataclass(frozen=True)
class RoundResult:
    """All ranks' states and, where one failed, their messages.

    Attributes:
        states: one per rank.
        failures: "rank R: traceback" of every failed rank.
        signatures: each rank's `BucketPlan.signature`, 0 where it has no bucket.
    """

    states: tuple[RoundState, ...]
    failures: tuple[str, ...] = field(default=())
    signatures: tuple[int, ...] = field(default=())

    @property
    def worst(self) -> RoundState:
        """The state that decides what every rank does next."""
        return max(self.states)

    @property
    def same_bucket(self) -> bool:
        """True if every rank has a bucket and all hold the same tensors."""
        return self.worst is RoundState.BUCKET and len(set(self.signatures)) == 1


class TrainerGroup(Protocol):
    """What the sync needs of the trainer's processes."""

    def agree(self, state: RoundState, failure: str | None, signature: int = 0) -> RoundResult:
        """Exchange states with every trainer rank; all get the same result."""

    def gather(self, item: bytes) -> list[bytes] | None:
        """Collect one item of each TP rank of this replica on its leader; None elsewhere."""


class SingleProcess:
    """A `TrainerGroup` of one rank, for scripts."""

    def agree(self, state: RoundState, failure: str | None, signature: int = 0) -> RoundResult:
        """See `TrainerGroup`."""
        return RoundResult((state,), (f"rank 0: {failure}",) if failure else (), (signature,))

    def gather(self, item: bytes) -> list[bytes] | None:
        """See `TrainerGroup`."""
        return [item]


def agree_on_all_ranks(state: RoundState, failure: str | None, signature: int = 0) -> RoundResult:
    """`TrainerGroup.agree` on torch's default group; messages travel only where a rank failed."""
    rows = torch.zeros(dist.get_world_size(), 2, dtype=torch.int64)
    rows[dist.get_rank()] = torch.tensor([int(state), signature])
    dist.all_reduce(rows)
    states = tuple(RoundState(value) for value in rows[:, 0].tolist())
    signatures = tuple(rows[:, 1].tolist())
    if max(states) < RoundState.FAILED:
        return RoundResult(states, (), signatures)
    messages: list[str | None] = [None] * len(states)
    dist.all_gather_object(messages, failure)
    failures = (f"rank {rank}: {text}" for rank, text in enumerate(messages) if text)
    return RoundResult(states, tuple(failures), signatures)


class TorchTrainerGroup:
    """A `TrainerGroup` on torch.distributed; the default group must have a CPU backend.

    Args:
        tp_mesh: one-dimensional device mesh of the ranks that share this replica
            (verl's "infer_tp").
    """

    def __init__(self, tp_mesh: Any) -> None:
        self._tp_group = tp_mesh.get_group()
        self._tp_ranks: list[int] = tp_mesh.mesh.tolist()
        self._is_leader: bool = tp_mesh.get_local_rank() == 0

    def agree(self, state: RoundState, failure: str | None, signature: int = 0) -> RoundResult:
        """See `TrainerGroup`."""
        return agree_on_all_ranks(state, failure, signature)

    def gather(self, item: bytes) -> list[bytes] | None:
        """See `TrainerGroup`."""
        items: list[Any] | None = [None] * len(self._tp_ranks) if self._is_leader else None
        dist.gather_object(item, items, dst=self._tp_ranks[0], group=self._tp_group)
        return items
