"""Disaggregated mode: the process groups that the trainer forms with all engine ranks.

There are two groups. In one the trainer's first rank broadcasts. In the other all trainer ranks
send. A trainer of one rank has only the first group. A group is kept from sync to sync. It is
formed anew when replicas have joined or left, and after a failure, because a collective may be
outstanding in it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from sglang_loader.common.broadcast.broadcast import BroadcastError
from sglang_loader.common.broadcast.update_group import (
    GROUP_PREFIX,
    LIMITED_BY,
    GroupPlace,
    MeetingPoint,
    backend_of,
    join,
    leave,
    secret_of,
    was_left,
)
from sglang_loader.common.ranks import Ranks
from sglang_loader.common.threads import in_thread
from verl_sglang_sync.engine.server_client import operations
from verl_sglang_sync.engine.server_client.client import SGLangServerClient
from verl_sglang_sync.engine.server_client.errors import ServerError
from verl_sglang_sync.trainer_ranks import own_rank, world_size

logger = logging.getLogger(__name__)

LEAVE_S = 30.0
"""Longest wait for the other ranks' joins to fail after a group could not be formed."""
REPLY_S = 2.0


class UpdateGroupError(BroadcastError):
    """A group that was not formed. The message names the replica at fault, if any."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A rollout replica that takes part in a sync.

    Attributes:
        identity: changes if the server is restarted at the same address.
        base_url: its server's URL, such as "http://10.0.0.1:30000".
        client: client of that server.
        num_ranks: number of tensor-parallel ranks of its engine.
    """

    identity: str
    base_url: str
    client: SGLangServerClient = field(compare=False)
    num_ranks: int


@dataclass(frozen=True)
class UpdateGroup:
    """A formed group, in a trainer rank. Only rank 0 has more than the first two attributes.

    Attributes:
        name: its name in the engines.
        process_group: torch's. The trainer ranks are its first ranks.
        replicas: in rank order.
        meeting: the store, kept alive as long as the group.
        secret: signs the descriptors of its sessions.
    """

    name: str
    process_group: Any
    replicas: tuple[Replica, ...] = ()
    meeting: MeetingPoint | None = None
    secret: bytes = b""


class UpdateGroups:
    """The groups of some trainer ranks and engine ranks, one after the other.

    Each of these trainer ranks has such an object.

    Args:
        address: this host's, as the replicas reach it. Only the first rank's is used.
        device: device of the sent buffers. On a GPU the group uses NCCL, else gloo.
        timeout_s: limit of the wait for all ranks, in seconds.
        transfer_s: longest time of a transfer in a group, in seconds.
        trainers: all trainer ranks, which make the same calls. None: only the first one takes part.

    Attributes:
        current: the current group, or None.
        abandoned: on the first rank, names of groups that the engines are still in. The engines
            leave these groups when the next group is formed.
    """

    def __init__(
        self,
        *,
        address: str,
        device: torch.device,
        timeout_s: float,
        transfer_s: float,
        trainers: Ranks | None = None,
    ) -> None:
        self.address = address
        self.current: UpdateGroup | None = None
        self._device = device
        self._timeout_s, self._transfer_s = timeout_s, transfer_s
        self._trainers = Ranks() if trainers is None else trainers
        self._rank, self._num_trainers = 0, 1
        if trainers is not None:
            self._rank, self._num_trainers = own_rank(), world_size()
        self.abandoned: list[str] = []

    def with_replicas(self, replicas: Sequence[Replica] | None) -> UpdateGroup:
        """Return the group of exactly these replicas. Collective.

        Args:
            replicas: on the first rank. None on the others.

        Raises:
            ValueError: no replicas.
            ServerError: a server does not answer.
            UpdateGroupError: the group could not be formed.
        """
        chosen: GroupPlace | str | None = None
        meeting: MeetingPoint | None = None
        if self._rank == 0 and replicas is not None:
            chosen, meeting = self._current_or_new(replicas)
        # The first rank chooses, as it alone knows the replicas.
        chosen = self._trainers.gather(chosen)[0]
        if self.current is None or chosen != self.current.name:
            self.abandon()
            if not isinstance(chosen, GroupPlace):
                raise UpdateGroupError("the trainer's first rank could form no group of all ranks")
            # In a thread, because a join can only be ended from outside.
            own = in_thread(partial(self._join, chosen), "weight-sync-join")
            if meeting is None or replicas is None:
                self.current = self._follow(chosen, own)
            else:
                self.current = self._lead(chosen, own, meeting, tuple(replicas))
        return self.current

    def abandon(self) -> None:
        """Leave the current group after a failure. The next sync forms another."""
        group, self.current = self.current, None
        if group is not None:
            if self._rank == 0:  # the others never form a group, and would collect names for ever
                self.abandoned.append(group.name)
            leave(group.process_group, broken=True)

    def _current_or_new(
        self, replicas: Sequence[Replica]
    ) -> tuple[GroupPlace | str, MeetingPoint | None]:
        """Find or prepare the group of these replicas, on the first rank.

        Returns:
            The name of the current group and None, if the group has these replicas. Otherwise the
            place where the next group meets, and its store.
        """
        if not replicas:
            raise ValueError("a sync needs at least one replica, got none")
        if self.current is not None and was_left(self.current.process_group):
            logger.warning("an engine has left %s: another group is formed", self.current.name)
            self.abandon()
        if self.current is not None and self.current.replicas == tuple(replicas):
            return self.current.name, None
        for replica in replicas:
            replica.client.run(operations.model_info())  # fail now if a server is gone
        # Engines leave their old groups first. Each group holds threads, sockets and memory.
        if self.current is not None:
            self._dissolve(self.current)
        _leave_servers(replicas, self.abandoned)
        self.abandoned = []
        name = f"{GROUP_PREFIX}{secrets.token_hex(4)}"
        size = self._num_trainers + sum(replica.num_ranks for replica in replicas)
        meeting = MeetingPoint(
            self.address,
            size,
            self._num_trainers,
            limit_s=self._timeout_s,
            transfer_s=self._transfer_s,
        )
        return GroupPlace(name, self.address, meeting.port, size), meeting

    def _join(self, place: GroupPlace, _: object) -> Any:
        return join(place, self._rank, self._device)

    def _follow(self, place: GroupPlace, own: Future[Any]) -> UpdateGroup:
        try:
            return UpdateGroup(place.name, own.result(self._timeout_s))
        except Exception as error:
            # The join may still succeed later: then this process leaves at once.
            problem = repr(error) if own.done() else _too_late(self._timeout_s)
            own.add_done_callback(_leave_late)
            raise UpdateGroupError(f"{place.name} was not formed: {problem}") from None

    def _lead(
        self,
        place: GroupPlace,
        own: Future[Any],
        meeting: MeetingPoint,
        replicas: tuple[Replica, ...],
    ) -> UpdateGroup:
        """Request that all replicas join. Their ranks come after the trainer's."""
        # The requests return when all have joined, so all must be under way together.
        joined: list[Future[Any]] = []
        rank_offset = self._num_trainers
        for replica in replicas:
            joined.append(
                replica.client.submit(
                    operations.init_update_group(
                        master_address=place.address,
                        master_port=place.port,
                        rank_offset=rank_offset,
                        world_size=place.world_size,
                        group_name=place.name,
                        backend=backend_of(self._device),
                    )
                )
            )
            rank_offset += replica.num_ranks
        wait([own, *joined], timeout=self._timeout_s, return_when=FIRST_EXCEPTION)
        if problem := _why_not_formed(replicas, joined, own, self._timeout_s):
            self.abandoned.append(place.name)  # some engine may have joined
            meeting.call_off()
            wait([own, *joined], REPLY_S)
            meeting.close()  # for ranks that have met, and connect
            wait([own, *joined], LEAVE_S)
            own.add_done_callback(_leave_late)
            raise UpdateGroupError(f"{place.name} was not formed: {problem}")
        logger.info("formed %s of %d replicas, %d ranks", place.name, len(replicas), rank_offset)
        group = own.result()
        return UpdateGroup(place.name, group, replicas, meeting, secret_of(group))

    def _dissolve(self, group: UpdateGroup) -> None:
        """Leave a healthy group at the same time as its engines."""
        self.current = None
        # The other trainer ranks leave when the next group is formed.
        is_alone = self._num_trainers == 1
        leave_group = partial(leave, group.process_group, broken=not is_alone)
        _leave_servers(group.replicas, [group.name], leave_group)


def _leave_late(joined: Future[Any]) -> None:
    """Leave a group that this process has joined, and another rank has not."""
    if joined.exception() is None:
        leave(joined.result(), broken=True)


def _why_not_formed(
    replicas: Sequence[Replica], joined: Sequence[Future[Any]], own: Future[Any], timeout_s: float
) -> str | None:
    """Describe the replica that failed to join, or the late ones. None: all have joined."""
    failure = own.exception() if own.done() else None
    if failure is not None:
        wait(joined, timeout=REPLY_S, return_when=FIRST_EXCEPTION)  # a replica may know better
    # An engine that refused is the cause, the others are only late.
    for number, (replica, future) in enumerate(zip(replicas, joined, strict=True)):
        if future.done() and (error := future.exception()) is not None:
            return f"replica {number} ({replica.base_url}) did not join the update group: {error}"
    silent = [r.base_url for r, future in zip(replicas, joined, strict=True) if not future.done()]
    if own.done() and failure is None and not silent:
        return None
    return f"{failure or _too_late(timeout_s)}, no word of: {', '.join(silent) or 'nobody'}"


def _too_late(timeout_s: float) -> str:
    return f"not all ranks came within {timeout_s:g} s, of {LIMITED_BY}"


def _leave_servers(
    replicas: Sequence[Replica], names: Sequence[str], meanwhile: Callable[[], None] | None = None
) -> None:
    """Request that the engines leave the groups, and call `meanwhile`. Errors are only logged."""
    futures = [
        (replica, name, replica.client.submit(operations.destroy_update_group(name)))
        for replica in replicas
        for name in names
    ]
    if meanwhile is not None:
        meanwhile()
    for replica, name, future in futures:
        try:
            future.result()
        except ServerError as error:
            logger.info("%s did not leave %s: %s", replica.base_url, name, error)
