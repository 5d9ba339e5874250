"""Disaggregated mode: the replicas, and the process group that the trainer forms with them.

A group is kept from sync to sync. It is formed anew when replicas have joined or left, and after a
failure, because a collective may be outstanding in it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_loader.common.broadcast.broadcast import BroadcastError
from sglang_loader.common.broadcast.update_group import (
    GROUP_PREFIX,
    GroupPlace,
    MeetingPoint,
    backend_of,
    join,
    leave,
    secret_of,
    was_left,
)
from sglang_loader.common.threads import in_thread
from verl_sglang_sync.engine.server_client import ServerError, SGLangServerClient, operations
from verl_sglang_sync.engine.session import SessionSockets

logger = logging.getLogger(__name__)

LEAVE_S = 30.0
"""How long the ranks of a group that was not formed are waited for: each finds out by itself."""
REPLY_S = 2.0


class UpdateGroupError(BroadcastError):
    """A group was not formed; names the replica that is to blame."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A rollout replica that takes part in a sync.

    Attributes:
        identity: differs for a server that was restarted at the same address.
        base_url: of its server, such as "http://10.0.0.1:30000"; `client`: of the same.
        num_ranks: tensor-parallel ranks of its engine.
    """

    identity: str
    base_url: str
    client: SGLangServerClient = field(compare=False)
    num_ranks: int


@dataclass(frozen=True)
class UpdateGroup:
    """A formed group.

    Attributes:
        name: by which the engines know it.
        process_group: torch's; the trainer is rank 0.
        replicas: in rank order.
        meeting: the store through which NCCL's ranks connect at their first collective.
        secret: what only its ranks know; it signs the invitations to its sessions.
        sockets: for the session with each engine rank, in rank order.
        others: names of further groups with the same replicas.
    """

    name: str
    process_group: Any
    replicas: tuple[Replica, ...]
    meeting: MeetingPoint
    secret: bytes
    sockets: tuple[SessionSockets, ...]
    others: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [self.name, *self.others]

    @property
    def num_engine_ranks(self) -> int:
        return sum(replica.num_ranks for replica in self.replicas)


class UpdateGroups:
    """Keeps the current group; lives in the trainer's first rank.

    Args:
        address: of this host, as the replicas reach it.
        device: of the buffers that are broadcast; a CPU's go over gloo, a GPU's over NCCL.
        timeout_s: limit of the wait for a rank, in seconds.
    """

    def __init__(self, *, address: str, device: torch.device, timeout_s: float) -> None:
        self._address = address
        self._device = device
        self._timeout_s = timeout_s
        self._group: UpdateGroup | None = None
        self._left: list[str] = []  # names of groups that the engines still know

    def with_replicas(self, replicas: Sequence[Replica]) -> UpdateGroup:
        """The group of exactly these replicas.

        Raises:
            ValueError: no replicas.
            ServerError: a server does not answer.
            UpdateGroupError: a replica did not join; the others have left.
        """
        if not replicas:
            raise ValueError("a sync needs at least one replica, got none")
        if self._group is not None and was_left(self._group.process_group):
            logger.warning("an engine has left %s: another group is formed", self._group.name)
            self.abandon()
        if self._group is not None and self._group.replicas == tuple(replicas):
            return self._group
        for replica in replicas:
            replica.client.run(operations.model_info())  # nobody waits for a server that is gone
        if self._group is not None:
            self._dissolve(self._group)
        left, self._left = self._left, []
        _leave_servers(replicas, left)
        self._group = self._form(tuple(replicas))
        return self._group

    def is_current(self, replicas: Sequence[Replica]) -> bool:
        group = self._group
        if group is None or was_left(group.process_group):
            return False
        return group.replicas == tuple(replicas)

    def abandon(self) -> None:
        """Give up the group after a failure; the next sync forms another."""
        group, self._group = self._group, None
        if group is not None:
            self._left += group.names
            leave(group.process_group, broken=True)

    def _form(self, replicas: tuple[Replica, ...]) -> UpdateGroup:
        num_ranks = sum(replica.num_ranks for replica in replicas)
        place, meeting = self.meet(num_trainers=1, num_engine_ranks=num_ranks)
        group = self.join(place, meeting, replicas, num_trainers=1)
        sockets = tuple(SessionSockets(self._address) for _ in range(num_ranks))
        return UpdateGroup(place.name, group, replicas, meeting, secret_of(group), sockets)

    def meet(self, *, num_trainers: int, num_engine_ranks: int) -> tuple[GroupPlace, MeetingPoint]:
        name, world_size = f"{GROUP_PREFIX}{secrets.token_hex(4)}", num_trainers + num_engine_ranks
        meeting = MeetingPoint(self._address, world_size, num_trainers)
        return GroupPlace(name, self._address, meeting.port, world_size), meeting

    def join(
        self,
        place: GroupPlace,
        meeting: MeetingPoint,
        replicas: Sequence[Replica],
        *,
        num_trainers: int,
    ) -> Any:
        """Join a group, which this process serves the meeting point of, together with all replicas;
        their ranks come after the trainer's, of which this one is the first. Returns the process
        group.

        Raises:
            UpdateGroupError: a rank did not join; the others have left.
        """
        joined: list[Future[Any]] = []
        rank_offset = num_trainers
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
        own = join_in_thread(place, 0, self._device)
        wait([own, *joined], timeout=self._timeout_s, return_when=FIRST_EXCEPTION)
        if problem := _why_not_formed(replicas, joined, own, self._timeout_s):
            self._left.append(place.name)  # some engine may have joined
            meeting.close()
            wait([own, *joined], LEAVE_S)
            own.add_done_callback(_leave_late)
            raise UpdateGroupError(f"{place.name} was not formed: {problem}")
        logger.info("formed %s of %d replicas, %d ranks", place.name, len(replicas), rank_offset)
        return own.result()

    def _dissolve(self, group: UpdateGroup) -> None:
        """Leave a healthy group together with whoever is still there."""
        self._group = None
        _leave_servers(
            group.replicas, group.names, meanwhile=lambda: leave(group.process_group, broken=False)
        )


def join_in_thread(place: GroupPlace, rank: int, device: torch.device) -> Future[Any]:
    """Join a group; the future gets the process group."""
    return in_thread(lambda _: join(place, rank, device), "weight-sync-join")


def _leave_late(joined: Future[Any]) -> None:
    """Of a group that some rank did not join, though this process did."""
    if joined.exception() is None:
        leave(joined.result(), broken=True)


def _why_not_formed(
    replicas: Sequence[Replica], joined: Sequence[Future[Any]], own: Future[Any], timeout_s: float
) -> str | None:
    """The replica that failed to join, or whom this process waited for in vain; None: all came."""
    failure = own.exception() if own.done() else None
    if failure is not None:
        wait(joined, timeout=REPLY_S, return_when=FIRST_EXCEPTION)  # a replica may know better
    for number, (replica, future) in enumerate(zip(replicas, joined, strict=True)):
        if future.done() and (error := future.exception()) is not None:
            return f"replica {number} ({replica.base_url}) did not join the update group: {error}"
    silent = [r.base_url for r, future in zip(replicas, joined, strict=True) if not future.done()]
    if own.done() and failure is None and not silent:
        return None
    reason = failure or f"not all ranks came within {timeout_s:g} s"
    return f"{reason}; no word of: {', '.join(silent) or 'nobody'}"


def _leave_servers(
    replicas: Sequence[Replica], names: Sequence[str], meanwhile: Callable[[], None] | None = None
) -> None:
    """Have the engines destroy their part; a server that is gone, or has done so, is fine."""
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
