"""The process group of all trainer ranks and all engine ranks, in which each trainer rank sends.

A trainer rank has the same rank in it; the engine ranks follow, in the order of the update group,
with which it is formed anew. A trainer of one rank has that group already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_loader.common.broadcast.update_group import GroupPlace, MeetingPoint, leave
from verl_sglang_sync.collective import TrainerGroup, own_rank, world_size
from verl_sglang_sync.engine.update_groups import (
    UpdateGroup,
    UpdateGroupError,
    UpdateGroups,
    join_in_thread,
)


@dataclass(frozen=True)
class JoinedGroup:
    """A group that this rank is in; on its first rank with the store by which its ranks connect."""

    name: str
    process_group: Any
    meeting: MeetingPoint | None = None


class SenderGroup:
    """Keeps the current group, if there is one; lives in every trainer rank.

    Args:
        groups: of the trainer's first rank; None on the others.
        timeout_s: limit of the wait for a rank, in seconds.
    """

    def __init__(
        self,
        groups: UpdateGroups | None,
        trainers: TrainerGroup,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.current: JoinedGroup | None = None
        self._groups = groups
        self._trainers = trainers
        self._device = device
        self._timeout_s = timeout_s

    def formed(self, update_group: UpdateGroup | None) -> str:
        """Have the group of exactly these engine ranks; collective; its name.

        Args:
            update_group: on the first rank: of this sync; None: there is none, it has failed.
        """
        if world_size() == 1:
            assert update_group is not None, "the only rank has formed it"
            self.current = JoinedGroup(update_group.name, update_group.process_group)
        elif self._groups is not None:
            self._lead(self._groups, update_group)
        else:
            self._follow()
        assert self.current is not None
        return self.current.name

    def _lead(self, groups: UpdateGroups, update_group: UpdateGroup | None) -> None:
        """Tell the other ranks where to meet, or that the group is the same, or that none is."""
        if update_group is None:
            self._trainers.all_gather(None)
            raise UpdateGroupError("there is no update group for all trainer ranks to join")
        if self.current is not None and self.current.name in update_group.others:
            self._trainers.all_gather(self.current.name)
            return
        told: GroupPlace | None = None
        try:
            self.abandon()
            told, meeting = groups.meet(
                num_trainers=world_size(), num_engine_ranks=update_group.num_engine_ranks
            )
            update_group.others.append(told.name)
        finally:
            self._trainers.all_gather(told)
        replicas = update_group.replicas
        group = groups.join(told, meeting, replicas, num_trainers=world_size())
        self.current = JoinedGroup(told.name, group, meeting)

    def _follow(self) -> None:
        told = self._trainers.all_gather(None)[0]
        if self.current is not None and told == self.current.name:
            return
        self.abandon()
        if not isinstance(told, GroupPlace):
            raise UpdateGroupError("the trainer's first rank could form no group of all ranks")
        joining = join_in_thread(told, own_rank(), self._device)
        try:
            self.current = JoinedGroup(told.name, joining.result(self._timeout_s))
        except Exception as error:
            raise UpdateGroupError(f"{told.name} was not formed: {error!r}") from None

    def abandon(self) -> None:
        """Leave the group; the next sync that is sent forms another."""
        group, self.current = self.current, None
        if group is not None and world_size() > 1:
            leave(group.process_group, broken=True)
