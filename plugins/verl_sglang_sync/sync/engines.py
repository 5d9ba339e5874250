"""The engine ranks that a trainer rank syncs, and how its packed buckets get to them.

    engines.open(stack, engine_ranks, task, proof)      # fills the list: one, many, or none
    delivery = engines.delivery(engine_ranks, report)   # of an export's buckets
    engines.abandon()                # a sync has failed: drop what the next must not use

`ColocatedEngine`: every trainer rank has a session with the engine rank on its own device, which
maps the trainer rank's staging buffers. `RemoteEngines` (disaggregated): the first trainer rank has
the sessions with all engine ranks. Exported buckets are broadcast to all engine ranks. By the copy
table, engine ranks map the parameters of trainer ranks on their host, and the others send to them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sglang_loader.common.ranks import attempt
from sglang_loader.common.session.folder import SessionFolder, remove_orphans
from sglang_loader.common.session.messages import Proof
from sglang_loader.common.shared_memory import BufferHandle
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.engine_ranks import (
    EngineRank,
    EngineServer,
    KnownEngineRank,
    OpeningRequest,
)
from verl_sglang_sync.engine.session import SentHandles, SessionSockets, TrainerSession
from verl_sglang_sync.engine.update_groups import Replica, UpdateGroup, UpdateGroups
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.broadcast import BroadcastDelivery
from verl_sglang_sync.routes.export import Delivery
from verl_sglang_sync.routes.mapped_delivery import MappedDelivery
from verl_sglang_sync.routes.table.table_route import TableRoute
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sources.memory_blocks import BlockNames
from verl_sglang_sync.trainer_ranks import TrainerRanks, own_rank, world_size


@dataclass(frozen=True, kw_only=True)
class SyncTask:
    """The arguments of one sync, see `WeightSync.sync`.

    Attributes:
        id: a random text, by which an engine rank knows the sessions of this sync.
    """

    weights: Iterable[NamedTensor]
    version: str | None
    report: SyncReport
    replicas: Sequence[Replica]
    id: str = field(default_factory=partial(secrets.token_hex, 8))


@dataclass(eq=False)
class ColocatedEngine:
    """The engine rank on this trainer rank's device.

    Attributes:
        _engine: the replica's server on its leader. None on the other ranks.
    """

    _engine: EngineServer | None
    _ranks: TrainerRanks
    _settings: WeightSyncConfig

    def __post_init__(self) -> None:
        self.sockets = SessionSockets()
        self._known_ranks = (KnownEngineRank(),)
        self._names, self._sent = BlockNames(), SentHandles()

    def open(
        self, stack: ExitStack, engine_ranks: list[EngineRank], task: SyncTask, proof: Proof
    ) -> None:
        """Make this rank's session. The replica's leader requests those of all its ranks."""
        request = OpeningRequest(self._engine, task.version)
        session = TrainerSession(
            self.sockets, self._settings, self._names, self._sent, sync=task.id, proof=proof
        )
        stack.enter_context(session)
        engine_ranks.append(EngineRank("", session, request, self._known_ranks[0]))
        descriptors, of_replica = self._ranks.gather(session.descriptor), self._ranks.replica_ranks
        if own_rank() == of_replica[0]:
            # One request for all TP ranks. Each takes the descriptor at its own position.
            request.post([descriptors[rank] for rank in of_replica])

    def prepare_next(self) -> None:
        """Prepare the next session if possible. Call this when this thread would only wait."""
        attempt(self.sockets.prepare)  # the next `open` reports an error that lasts

    def delivery(self, engine_ranks: Sequence[EngineRank], report: SyncReport) -> Delivery:
        """Return the delivery of an export's buckets to these engine ranks."""
        return MappedDelivery(engine_ranks, self._settings, report)

    def known_ranks(self) -> Sequence[KnownEngineRank]:
        """Return the engine rank."""
        return self._known_ranks

    def record(self, handle: BufferHandle) -> None:
        """Write down a handle before it leaves this process."""
        self.sockets.folder.record(handle)

    def abandon(self) -> None:
        """Drop nothing: there is no process group."""


@dataclass(eq=False)
class RemoteEngines:
    """The engine ranks of all replicas, on other devices.

    Attributes:
        _groups: makes groups of the trainer's first rank and all engine ranks. None on the other
            trainer ranks, which have no sessions.
        _senders: makes groups of all trainer ranks and the engine ranks that they send to.
        route: the route by which all trainer ranks may send. Set before the first sync.
    """

    _groups: UpdateGroups | None
    _senders: UpdateGroups
    _settings: WeightSyncConfig

    def __post_init__(self) -> None:
        remove_orphans()  # as a session's trainer does when it makes a folder of its own
        self._known_ranks: Sequence[KnownEngineRank] = ()
        self._group: UpdateGroup | None = None  # of the last sync, on the first trainer rank
        self._sending: UpdateGroup | None = None  # of the last sync in which all ranks might send
        self._known_group = ""  # name of the group of these engine ranks
        # By server and TP rank. An engine that was started anew says that it maps nothing.
        self._sent: dict[tuple[str, int], SentHandles] = {}
        self._folder: SessionFolder | None = None  # made with the first handle, which it lists
        self.route: TableRoute | None = None

    def open(
        self, stack: ExitStack, engine_ranks: list[EngineRank], task: SyncTask, proof: Proof
    ) -> None:
        """Make all sessions. Before that, make the process groups that do not exist yet."""
        group, senders = None, ""
        # A group whose replicas have changed ends before another is formed: engines wait for that.
        self._group = None
        if self._groups is not None:
            self._group = group = self._group_of(self._groups, task.replicas)
        if self.route is not None and self.route.is_prepared and self.route.sends:
            self._sending = self._sending_group_of(group)
            senders = self._sending.name
        if group is not None:
            self._open_sessions(group, senders, stack, task, proof, engine_ranks)

    def prepare_next(self) -> None:
        """Prepare nothing: the engines of the next sync may be others."""

    def delivery(self, engine_ranks: Sequence[EngineRank], report: SyncReport) -> Delivery:
        """Return the delivery of an export's buckets to these engine ranks."""
        if self._group is None:
            return MappedDelivery((), self._settings, report)
        limit_s = self._settings.request_timeout_s
        return BroadcastDelivery(engine_ranks, self._group.process_group, limit_s, report)

    def known_ranks(self) -> Sequence[KnownEngineRank]:
        """Return all engine ranks, on the first trainer rank.

        If the engine ranks change, these are new objects.
        """
        return self._known_ranks

    def record(self, handle: BufferHandle) -> None:
        """Write down a handle before it leaves this process."""
        if self._folder is None:
            self._folder = SessionFolder()
        self._folder.record(handle)

    def sending_group(self) -> Any:
        """Return torch's process group in which all trainer ranks send in this sync."""
        assert self._sending is not None, "formed before the sessions were opened"
        return self._sending.process_group

    def _group_of(self, groups: UpdateGroups, replicas: Sequence[Replica]) -> UpdateGroup:
        # After a failed sync, the engines leave both groups now, before they join others.
        self._hand_over_abandoned(groups)
        group = groups.with_replicas(replicas)
        if group.name != self._known_group:
            self._senders.abandon()  # its engine ranks leave when the next is formed
            self._hand_over_abandoned(groups)
            self._known_group = group.name
            self._known_ranks = [
                KnownEngineRank(replica=number)
                for number, replica in enumerate(replicas)
                for _ in range(replica.num_ranks)
            ]
        return group

    def _hand_over_abandoned(self, groups: UpdateGroups) -> None:
        """Make all replicas leave the sending groups, also those that are sent to no more."""
        groups.abandoned += self._senders.abandoned
        self._senders.abandoned = []

    def _sending_group_of(self, group: UpdateGroup | None) -> UpdateGroup:
        """Return the group of all trainer ranks and the replicas that they send to.

        Args:
            group: of the first rank and all replicas. None on the other ranks.
        """
        if group is None:
            return self._senders.with_replicas(None)
        numbers = {known.replica for known in self._known_ranks if known.is_sent_to}
        # Engines that have changed are not known yet. This sync is exported, but the other trainer
        # ranks wait for a group.
        numbers = numbers or {known.replica for known in self._known_ranks}
        sent_to = [replica for number, replica in enumerate(group.replicas) if number in numbers]
        is_same = world_size() == 1 and len(sent_to) == len(group.replicas)
        return group if is_same else self._senders.with_replicas(sent_to)

    def _open_sessions(
        self,
        group: UpdateGroup,
        senders: str,
        stack: ExitStack,
        task: SyncTask,
        proof: Proof,
        engine_ranks: list[EngineRank],
    ) -> None:
        """Request a session with each engine rank of every replica, which stop serving until it
        ends. Engine ranks are added to `engine_ranks` before their replica's request is sent.
        """
        sockets, known_ranks = SessionSockets(self._senders.address), iter(self._known_ranks)
        for replica in group.replicas:
            request = OpeningRequest(replica.client, task.version)
            descriptors = []
            for rank in range(replica.num_ranks):
                known = next(known_ranks)
                session = TrainerSession(
                    sockets,
                    self._settings,
                    BlockNames(),
                    self._sent.setdefault((replica.base_url, rank), SentHandles()),
                    sync=task.id,
                    proof=proof,
                    group=group.name,
                    senders=senders if known.is_sent_to else "",
                    secret=group.secret,
                )
                stack.enter_context(session)
                descriptors.append(session.descriptor)
                name = f"{replica.base_url}, TP rank {rank}"
                engine_ranks.append(EngineRank(name, session, request, known))
            request.post(descriptors)

    def abandon(self) -> None:
        """Leave all groups: a collective may be outstanding in them."""
        self._group = None  # the group ends with its last reference
        for groups in filter(None, (self._senders, self._groups)):
            groups.abandon()
