"""The route by the copy table: engine ranks get the trainer ranks' shards, without an export.

No bytes are exported or gathered. An engine rank joins its load plan with the weight map of the
trainer ranks' shards (`load_plan.copy_table`). It maps the memory of trainer ranks on its own host,
and copies from there the bytes that it needs. The other trainer ranks send it the bytes that it
lists, in rounds (`shard_sending`). The wire is chosen for each pair of ranks (`wires`). Engines
share the trainer ranks' GPUs, or have other GPUs.

The route traces the export once. The trace maps each exported tensor to bytes of shards. Each rank
then compares its own shards, bit for bit, with the full export that the engines load
(`sources.comparison`). The proof, and each sync after it for which parameters may have moved,
begins with the locations of all ranks' shards:

    route.learn(loaded_export)                     # after a good exported sync
    source = route.choose(export, report)          # in the next syncs
    route.recover(cause, export)                   # after a failed sync

An optimizer changes the contents of the memory, but neither the trace nor the locations. Parameters
that return at other addresses (`param_offload`) are located before each sync. Any other change is
detected before the engines may publish, and the sync is repeated.

Engines keep some blocks mapped from one session to the next:

    session                      locations and handles       blocks that engines keep mapped
    the proof                    new                         files of host memory alone
    the first good sync by the   new                         all, if they are those of the last
    route after it                                           session by the route
    a later good sync by the     the same locations, no      all
    route                        handles
    an exported session          dropped: `note_unmapped`    files of host memory alone, until a
                                                             second exported session
    a failed session, before     dropped: `forget`           none. The next session by the route
    anything was published                                   counts as a proof in this table
    any, of offloaded            new                         files of host memory alone
    parameters

After an exported session the next sync by the route is as the first one after a proof. If all
shards are sent, engines map no block, and the locations of the proof stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from sglang_loader.common.ranks import Reason, attempt
from sglang_loader.common.shared_memory import BufferHandle, drop_references, host_id
from verl_sglang_sync.engine.session import BlockNotMapped, EngineCannotMap
from verl_sglang_sync.report import SyncReport, warn_once
from verl_sglang_sync.routes.route import (
    LoadedExport,
    Recovery,
    Route,
    RouteContext,
    RouteState,
    SyncSource,
)
from verl_sglang_sync.routes.table.located import (
    NO_MEMORY,
    ParameterLocations,
    TablePlan,
    share_shards,
)
from verl_sglang_sync.routes.table.shard_sending import ShardSending
from verl_sglang_sync.routes.table.table_source import TableSource
from verl_sglang_sync.routes.table.transports import Transport
from verl_sglang_sync.routes.table.weight_map_builder import MemoryTable
from verl_sglang_sync.routes.table.wires import Wires
from verl_sglang_sync.sources.export import NamedTensor, unquantized
from verl_sglang_sync.sources.export_trace import NotTraceable, TracedExport
from verl_sglang_sync.sources.memory_blocks import Block, BlockNames, share_block
from verl_sglang_sync.sources.model_copies import check_copies, differing_copies
from verl_sglang_sync.sources.optimizer_steps import OPTIMIZER_STEPS
from verl_sglang_sync.sources.snapshot import (
    SourcesChanged,
    SourcesSnapshot,
    is_offloaded,
)
from verl_sglang_sync.trainer_ranks import own_rank

ROUNDS_PER_BUCKET = 2
"""Rounds are half a bucket: two staging buffers and two scratch buffers are two buckets."""


class TableRoute(Route):
    """The route by the copy table.

    Args:
        record: records a handle before the handle leaves this process.
        transport: makes the exchange of rounds, given the plan of a sender.

    Attributes:
        sends: True if an engine rank of any trainer rank is sent shards. Equal on all ranks.
    """

    fallback_text = "every weight is exported in full, instead of what the engines read"

    def __init__(
        self,
        context: RouteContext,
        record: Callable[[BufferHandle], None],
        transport: Transport,
    ) -> None:
        super().__init__(context)
        OPTIMIZER_STEPS.watch()
        self.sends = False
        self._may_map = "pull" in context.settings.routes
        self._may_send = "exchange" in context.settings.routes
        self._round_bytes = max(1, context.settings.bucket_bytes // ROUNDS_PER_BUCKET)
        self._record = record
        self._context = context
        self._sending = ShardSending(context, transport)
        self._block_names = BlockNames()
        self._plan: TablePlan | None = None
        self._wires: Wires | None = None
        self._is_colocated = context.is_colocated
        self._own_readers = range(0)  # positions of this rank's engine ranks among all
        # If None, the next sync locates the parameters and makes new handles.
        self._locations: ParameterLocations | None = None
        self._blocks_read: frozenset[str] = frozenset()  # in the last sync by this route

    def _source(self, weights: Iterable[NamedTensor], report: SyncReport) -> SyncSource | None:
        # A colocated engine rank stays the same object. An engine that was started anew has a load
        # plan of another name, which `Sessions.check_plans` refuses.
        if not self._is_colocated and not self._ranks.all(not self._have_changed()):
            warn_once("weight sync: full export for this sync, as the set of engines changed")
            return None
        if self.state is RouteState.PROVEN and not self._num_syncs:
            self.check_copies(weights)  # an optimizer may have stepped since the proof
        # After an exported session or a failure there are none: engines have unmapped all blocks.
        if is_offloaded(weights) or self._locations is None:
            reason = self._locate(weights, shares=True)
            if reason is not None and (reason.is_final or self.state is RouteState.LEARNT):
                self.refuse(reason)
            elif reason is not None:
                warn_once(f"weight sync: full export for this sync: {reason}")
            if reason is not None:
                return None
        assert self._locations is not None, "without a reason the parameters are located"
        # A trainer that offloads parameters must free their memory, and cannot free mapped memory.
        # The engines therefore keep blocks mapped only if the last sync read the same blocks.
        # A file of host memory takes seconds to map, and keeps no GPU memory.
        # No sync has read a block before a proof, so engines keep only files after a proof.
        locations = self._locations
        keep_mapped = locations.stays or self._blocks_read == locations.all_blocks
        assert self._plan is not None, "a prepared route has a plan"
        return TableSource(
            context=self._context,
            plan=self._plan,
            locations=locations,
            sending=self._sending if self.sends else None,
            positions=self._own_readers,
            round_bytes=self._round_bytes,
            weights=weights,
            report=report,
            keeps_mapped=keep_mapped,
            note_read=partial(self._note_read, locations, keep_mapped),
        )

    def can_learn(self, weights: Iterable[NamedTensor]) -> bool:
        return (self._may_map or self._may_send) and super().can_learn(weights)

    def prepare_to_learn(self, weights: Iterable[NamedTensor]) -> None:
        if (traced := self._source_map.trace_alone(weights)) is not None:
            self._make_plan(traced)

    def learn(self, export: LoadedExport) -> None:
        self.forget()
        self._sending.forget()
        self.sends = False
        known, hosts = self._known_ranks(), [outcome.host for outcome in export.loaded]
        assert len(known) == len(hosts), "one outcome for each engine rank of this rank"
        # One entry for each engine rank without a plan: True if only a saved plan was at fault.
        unplanned = [each.saved_plan_misfits for each in export.loaded if not each.has_plan]
        gathered = self._ranks.gather((host_id(), hosts, unplanned))
        trainer_hosts, reader_hosts, all_unplanned = zip(*gathered, strict=True)
        # Engine ranks are numbered over all trainer ranks, in the order of these.
        first = sum(map(len, reader_hosts[: own_rank()]))
        self._own_readers = range(first, first + len(hosts))
        self._prepared_for = known
        if misfits := list(chain(*all_unplanned)):
            # Engines whose saved plan does not fit trace the next sync.
            text = f"{len(misfits)} engine ranks have no load plan"
            self._note_obstacle(text, lasts=not all(misfits))
            return
        # Before the comparison, which checks that no engine reads copies that differ.
        self._wires = Wires(
            tuple(trainer_hosts),
            tuple(chain(*reader_hosts)),
            self._first_reader,
            can_map=self._may_map,
        )
        # If the shards of one rank differ from the export, no rank may use the route.
        reason = self._difference(export)
        if reason is None:
            reason = self._make_plan(self._source_map.traced)
        reason = self._ranks.common_reason(reason)
        if reason is None:
            if (obstacle := self._choose_wires()) is not None:
                self._note_obstacle(obstacle)
                return
            reason = self._locate(export.weights, shares=False)
            if reason is not None and reason.is_final and self._may_map and self._may_send:
                # Parameters that no engine can map can still be sent.
                self._send_everything(reason)
                self._wires = replace(self._wires, can_map=False)
                self._choose_wires()
                reason = self._locate(export.weights, shares=False)
        self._conclude(reason)

    def _send_everything(self, reason: Reason) -> None:
        """Send all shards from now on."""
        self._may_map = False
        warn_once(
            "weight sync: all weights are sent to the engines from now on, through staging "
            f"buffers, as an engine cannot map the trainer's memory: {reason}"
        )

    def _note_obstacle(self, text: str, *, lasts: bool = True) -> None:
        """Record why this exported sync cannot prepare the route. The next one may.

        Args:
            lasts: False if the next exported sync is sure to be without this obstacle.
        """
        warn_once(f"weight sync: {self.fallback_text}: {text}")
        self.reason = text if lasts else None

    def _choose_wires(self) -> str | None:
        """Find the engine ranks that are sent shards. Collective.

        Returns:
            The reason why the settings leave an engine rank without a wire, or None.
        """
        assert self._wires is not None and self._plan is not None
        wires, owners = self._wires, self._plan.traced.owners
        # Each trainer rank looks at its own engine ranks: 512 of them times 50,000 shards are many.
        own = [wires.is_sent_to(reader, owners) for reader in self._own_readers]
        sent_to = list(chain(*self._ranks.gather(own)))
        self.sends = any(sent_to)
        pairs = list(zip(self._known_ranks(), own, strict=True))
        replicas = {known.replica for known, is_sent_to in pairs if is_sent_to}
        for known, is_sent_to in pairs:
            # All engine ranks of a replica are in the group of those that are sent to.
            is_in_group = not self._is_colocated and known.replica in replicas
            known.is_sent_to = is_sent_to or is_in_group
        if self.sends and not self._may_send:
            return (
                f"{sum(sent_to)} of {len(sent_to)} engine ranks are on other nodes than trainer "
                "ranks whose shards they read, and routes has no exchange"
            )
        return None

    def recover(self, cause: BaseException | None, weights: Iterable[NamedTensor]) -> Recovery:
        cannot_map = None
        if isinstance(cause, EngineCannotMap):
            cannot_map = Reason(str(cause), is_final=True)
        if (agreed := self._ranks.common_reason(cannot_map)) is not None:
            self.refuse_unproven(agreed, cannot_map=True)
            return Recovery.EXPORT
        has_moved = cause is None or isinstance(cause, SourcesChanged | BlockNotMapped)
        # In disaggregated mode a repeated sync needs new sessions, see `RemoteEngines.abandon`.
        if self._is_colocated and self._ranks.all(has_moved):
            # A trace holds for parameters that have only moved, so the route stays proven.
            state = self.state
            self.forget()
            # Only a check: the next pass makes the handles.
            if self._locate(weights, shares=False) is None:
                self.state = state
                return Recovery.AGAIN
        return super().recover(cause, weights)

    def refuse_unproven(self, reason: Reason, *, cannot_map: bool) -> None:
        if cannot_map and self._may_map and self._may_send:
            self.forget()
            self._send_everything(reason)
            return
        super().refuse_unproven(reason, cannot_map=cannot_map)

    def forget(self) -> None:
        """Drop the preparation and the locations. The engines may have unmapped any block."""
        super().forget()
        # A failure after Commit may have left other blocks here than on other ranks.
        self._locations, self._blocks_read = None, frozenset()

    def note_unmapped(self) -> None:
        self._locations = None

    def _note_read(self, locations: ParameterLocations, keep_mapped: bool) -> None:
        """Record the blocks that the engines have read and keep mapped, after a good sync."""
        self._blocks_read = locations.all_blocks
        # A handle is used once. The next sync names the blocks alone, which are still mapped.
        used = replace(locations, handles=tuple({} for _ in locations.handles))
        self._locations = used if keep_mapped else None

    def _difference(self, export: LoadedExport) -> Reason | None:
        """Compare the full export with this rank's shards. Collective.

        If the comparison was not with the trace of now, export once more. The trace is another if
        parameters were replaced, or if the comparison found that the trace was wrong.

        Returns:
            The difference or the failure of the comparison, or None if the bytes are equal.

        Raises:
            WeightSyncError: an engine would get parts of different models.
        """
        comparison = export.comparison
        new_export: Iterable[NamedTensor] = ()
        reason = self._source_map.settle(comparison, export.weights)
        if reason is not None:
            return reason
        if not self._source_map.was_compared(comparison, export.weights):
            comparison = self._source_map.begin_comparison(export.weights)
            new_export = unquantized(export.weights) if comparison.traced is not None else ()
        if comparison.traced is not None:
            # A comparison may have a rank's own trace, which does not name the others' copies.
            self._check_copies_of(self._source_map.traced, export.weights)

        def finish() -> Reason | None:
            for pair in new_export:
                comparison.add([pair])
            return comparison.finish()

        problem, failed = attempt(finish)
        return problem or failed

    def check_copies(self, weights: Iterable[NamedTensor]) -> None:
        if self._plan is not None and self.is_prepared:
            self._check_copies_of(self._plan.traced, weights)

    def _check_copies_of(self, traced: TracedExport, weights: Iterable[NamedTensor]) -> None:
        """Check that the TP ranks of each engine get parts of one model. Collective.

        Raises:
            WeightSyncError: an engine would get parts of different models.
        """
        sources, _ = self._ranks.step(
            partial(self._source_map.parameters, weights, traced), passing=(SourcesChanged,)
        )
        if sources is None:
            return
        differences = differing_copies(traced, sources, self._ranks, self._device)
        assert self._wires is not None, "the wires are chosen before anything is compared"
        replicas: list[object] = [known.replica for known in self._known_ranks()]
        if self._is_colocated:
            replicas = [self._ranks.replica_ranks for _ in self._own_readers]
        readers = list(zip(replicas, self._own_readers, strict=True))
        check_copies(differences, readers, self._ranks, self._wires.holder)

    def _make_plan(self, traced: TracedExport) -> Reason | None:
        """Map all buckets to shards, if the present plan is outdated.

        Returns:
            The reason of a failure, or None.
        """
        buckets, plan = self._cutter.buckets, self._plan
        if plan is not None and plan.traced is traced and plan.buckets == buckets:
            return None
        self._plan, reason = attempt(partial(TablePlan.of, traced, buckets), NotTraceable)
        return reason

    def _locate(self, weights: Iterable[NamedTensor], *, shares: bool) -> Reason | None:
        """Locate the parameters of all ranks. Collective.

        Args:
            shares: create the handles that engines need. A handle keeps its memory until an engine
                uses the handle, so only a sync creates handles. If False, only check that the
                parameters can be located.

        Returns:
            The reason why engines cannot read the parameters, or None.
        """
        self._locations = None
        handles: list[BufferHandle] = []
        own, reason = self._ranks.step(
            partial(self._own_memory, weights, shares, handles),
            NotTraceable,
            passing=(SourcesChanged,),
        )
        if own is not None and shares:
            snapshot, own_table = own
            # An engine rank may read shards of any trainer rank.
            tables = self._ranks.gather(own_table)
            plan, wires, readers = self._plan, self._wires, self._own_readers
            assert plan is not None and wires is not None, "both have located this rank's memory"
            self._locations, reason = self._ranks.step(
                partial(ParameterLocations.of, plan, snapshot, tables, wires, readers), NotTraceable
            )
        if reason is not None:
            drop_references(handles)  # no engine gets these handles
        return reason

    def _own_memory(
        self, weights: Iterable[NamedTensor], shares: bool, handles: list[BufferHandle]
    ) -> tuple[SourcesSnapshot, MemoryTable]:
        """Locate this rank's parameters.

        Args:
            handles: the list to which new handles are added.

        Returns:
            A snapshot, to detect changes later, and the table for the other ranks.
        """
        assert self._plan is not None, "a trace is needed first"
        sources = self._source_map.parameters(weights, self._plan.traced)
        if is_offloaded(weights):
            # The parameters return in other memory, so the names of earlier blocks are outdated.
            self._block_names = BlockNames()
        assert self._wires is not None, "the wires are chosen with the plan"
        mapping = self._wires.readers_of(own_rank())
        # All is sent. The parameters may then have any addresses.
        if not mapping:
            return SourcesSnapshot(sources, with_addresses=False), NO_MEMORY
        share = partial(self._share_block, mapping if shares else (), handles)
        table = share_shards(self._plan.traced, sources, self._device, own_rank(), share)
        return SourcesSnapshot(sources), table

    def _share_block(
        self,
        mapping: Sequence[int],
        handles: list[BufferHandle],
        block: Block,
        member: torch.UntypedStorage,
    ) -> tuple[str, Mapping[int, BufferHandle]]:
        """Return a block's name, and a handle for each engine rank of `mapping`."""
        name = self._block_names.name_of(block, member)
        by_reader: dict[int, BufferHandle] = {}
        try:
            for reader in mapping:
                by_reader[reader] = share_block(block, member)
                handles.append(by_reader[reader])
                self._record(by_reader[reader])
        except ValueError as error:  # memory of a kind that has no handles
            raise NotTraceable(str(error)) from error
        return name, by_reader
