"""Route "pull": every engine rank reads the trainer ranks' parameters in place.

No bytes are exported, gathered, packed or sent. An engine rank maps the memory of all trainer
ranks' parameters, and its load plan copies the bytes that the engine rank needs. Engines share the
trainer ranks' GPUs, or have other GPUs of the same node.

The route traces the export once. The trace maps each exported tensor to bytes of shards. Each rank
then compares its own shards, bit for bit, with the full export that the engines load
(`sources.comparison`), and sends the locations of its shards to the other ranks:

    pull.learn(exported_sync)                     # after a good exported sync
    source = pull.choose(export, report)          # in the next syncs
    pull.recover(cause, export)                   # after a failed sync

An optimizer changes the contents of the memory, but neither the trace nor the locations. Parameters
that return at other addresses (`param_offload`) are located before each sync. Any other change is
detected before the engines may publish, and the sync is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, starmap

import torch

from sglang_loader.common.copies.strided import synchronize_device
from sglang_loader.common.ranks import Reason, attempt
from sglang_loader.common.session.messages import Loaded
from sglang_loader.common.shared_memory import BufferHandle, drop_references, host_id
from verl_sglang_sync.engine.engine_ranks import EngineRank
from verl_sglang_sync.engine.session import BlockNotMapped, EngineCannotMap
from verl_sglang_sync.ranks import own_rank
from verl_sglang_sync.report import SyncReport, warn_once
from verl_sglang_sync.routes.pull.located import (
    MemoryTable,
    ParameterLocations,
    PullPlan,
    SpreadRead,
    bucket_reads,
    share_shards,
)
from verl_sglang_sync.routes.route import (
    Delivery,
    ExportedSync,
    Poll,
    ReadyBucket,
    Recovery,
    Route,
    RouteContext,
    RouteState,
    SyncSource,
)
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sources.export_trace import NotTraceable, TracedExport
from verl_sglang_sync.sources.memory_blocks import Block, BlockNames, share_block
from verl_sglang_sync.sources.replicas import check_replicas, differing_replicas
from verl_sglang_sync.sources.shard_reads import ShardRead
from verl_sglang_sync.sources.snapshot import (
    SourcesChanged,
    SourcesSnapshot,
    empties_storages,
    require_sources,
)


class Pull(Route):
    """Route "pull".

    Args:
        record: records a handle before the handle leaves this process.
    """

    fallback_text = "the engines do not read the trainer's parameters in place"

    def __init__(self, context: RouteContext, record: Callable[[BufferHandle], None]) -> None:
        super().__init__(context, is_wanted="pull" in context.settings.routes)
        self._record = record
        self._block_names = BlockNames()
        self._plan: PullPlan | None = None
        self._is_colocated = context.is_colocated
        self._num_readers = 0  # engine ranks of all trainer ranks
        self._own_readers = range(0)  # positions of this rank's engine ranks among all
        # If None, the next sync locates the parameters and makes new handles.
        self._locations: ParameterLocations | None = None
        self._blocks_read: frozenset[str] = frozenset()  # in the last pulled sync
        self._any_can_read = True  # False if no engine rank of the last exported sync can pull

    def _source(self, weights: Iterable[NamedTensor], report: SyncReport) -> SyncSource | None:
        if not self._is_colocated and not self._ranks.all(not self._have_changed()):
            warn_once("weight sync: full export for this sync, as the set of engines changed")
            return None
        if self.state is RouteState.PROVEN and not self._num_syncs:
            self.check_replicas(weights)  # an optimizer may have stepped since the proof
        if empties_storages(weights) or self._locations is None:
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
        keep_mapped = self._blocks_read == set(self._locations.blocks)
        return PulledBuckets(self, self._locations, weights, report, keep_mapped)

    def wants_comparison(self, weights: Iterable[NamedTensor]) -> bool:
        is_worthwhile = self._any_can_read and self.can_learn(weights)
        return is_worthwhile and self._source_map.can_trace_before_export(weights)

    def prepare_to_learn(self, weights: Iterable[NamedTensor]) -> None:
        self._source_map.trace_alone(weights)
        if self._source_map.is_traced(weights):
            self._plan_reads()

    def learn(self, sync: ExportedSync) -> bool:
        self.forget()
        reasons = self.gather_obstacles(sync.loaded)
        distinct = [reason for reason in dict.fromkeys(reasons) if reason is not None]
        for reason in distinct:
            num = f"{reasons.count(reason)} of {len(reasons)} engine ranks"
            warn_once(f"{num} cannot read the trainer's parameters in place: {reason}")
        self.reason = ", ".join(distinct) or None
        return not distinct and self.prepare(sync)

    def gather_obstacles(self, loaded: Sequence[Loaded]) -> list[str | None]:
        """Gather the reasons why replicas cannot read in place. Collective.

        Returns:
            For each engine rank of all trainer ranks, the reason of its replica, or None if the
            replica can read in place.
        """
        readers, reasons = self._readers(), dict[int, str]()
        assert len(readers) == len(loaded), "one outcome for each engine rank of this rank"
        for reader, outcome in zip(readers, loaded, strict=True):
            if outcome.host != host_id():
                reasons[reader.replica] = "an engine is on another node"
            elif not outcome.may_read_in_place:
                reasons.setdefault(reader.replica, "an engine has no load plan")
        own = [reasons.get(reader.replica) for reader in readers]
        hosts, of_ranks = zip(*self._ranks.gather((host_id(), own)), strict=True)
        several = "the trainer's ranks are on several nodes" if len(set(hosts)) > 1 else None
        obstacles = [reason or several for reason in chain(*of_ranks)]
        self._any_can_read = None in obstacles
        return obstacles

    def prepare(self, sync: ExportedSync) -> bool:
        """Prepare the route for engine ranks that can all read in place. Call `forget` before."""
        weights = sync.weights
        nums = self._ranks.gather(len(sync.loaded))
        first = sum(nums[: own_rank()])
        self._num_readers, self._own_readers = sum(nums), range(first, first + len(sync.loaded))
        self._prepared_for = self._readers()
        own = self._difference(sync) or self._plan_reads()
        reason = self._ranks.common_reason(own)
        return self._conclude(reason or self._locate(weights, shares=False))

    def recover(self, cause: BaseException | None, weights: Iterable[NamedTensor]) -> Recovery:
        cannot_map = None
        if isinstance(cause, EngineCannotMap):
            cannot_map = Reason(str(cause), is_final=True)
        if (agreed := self._ranks.common_reason(cannot_map)) is not None:
            self.refuse(agreed)
            return Recovery.EXPORT
        has_moved = cause is None or isinstance(cause, SourcesChanged | BlockNotMapped)
        # In disaggregated mode a repeated sync needs new sessions, see `RemoteEngines.abandon`.
        if self._is_colocated and self._ranks.all(has_moved):
            state = self.state
            self.forget()
            if self._locate(weights, shares=False) is None:
                self.state = state
                return Recovery.AGAIN
        return super().recover(cause, weights)

    def forget(self) -> None:
        """Drop the preparation and the locations. The engines may have unmapped any block."""
        super().forget()
        self._locations = None

    def note_unmapped(self) -> None:
        self._locations = None

    def _note_read(self, locations: ParameterLocations, keep_mapped: bool) -> None:
        """Record the blocks that the engines have read and keep mapped, after a good sync."""
        self._blocks_read = frozenset(locations.blocks)
        used = replace(locations, handles=tuple({} for _ in locations.handles))
        self._locations = used if keep_mapped else None

    def _confirm(self, locations: ParameterLocations, sources: Mapping[str, torch.Tensor]) -> None:
        """Raise `SourcesChanged` if the parameters were replaced or have moved."""
        assert self._plan is not None, "a prepared route has a plan"
        if self._cutter.buckets != self._plan.buckets:
            raise SourcesChanged("the export is cut into other buckets")
        locations.snapshot.require_unchanged(sources)

    def _difference(self, sync: ExportedSync) -> Reason | None:
        """Compare the full export with this rank's shards. Collective.

        If the sync has no comparison, or the trace of its comparison is outdated, export once more.

        Returns:
            The difference or the failure of the comparison, or None if the bytes are equal.
        """
        comparison = sync.comparison
        new_export: Iterable[NamedTensor] = ()
        if comparison is None or not self._source_map.is_current(comparison, sync.weights):
            comparison = self._source_map.begin_comparison(sync.weights)
            new_export = sync.weights if comparison.traced is not None else ()
        if comparison.traced is not None:
            self._check_replicas(comparison.traced, comparison.parameters)

        def finish() -> Reason | None:
            for pair in new_export:
                comparison.add([pair])
            return comparison.finish()

        problem, failed = attempt(finish)
        return problem or failed

    def check_replicas(self, weights: Iterable[NamedTensor]) -> None:
        if self._plan is not None and self.is_prepared:
            traced = self._plan.traced
            sources, _ = self._ranks.step(
                partial(self._source_map.current, weights, traced), passing=(SourcesChanged,)
            )
            if sources is not None:
                self._check_replicas(traced, sources)

    def _check_replicas(self, traced: TracedExport, sources: Mapping[str, torch.Tensor]) -> None:
        """Check that the TP ranks of each engine get parts of one model. Collective.

        Raises:
            WeightSyncError: an engine would get parts of different models.
        """
        difference = differing_replicas(traced, sources, self._ranks, self._device)
        numbers = [self._first_reader + reader for reader in self._own_readers]
        near = [reader for reader in self._readers() if reader.reads_in_place]
        replicas: list[object] = [reader.replica for reader in near or self._readers()]
        if self._is_colocated:
            replicas = [self._ranks.replica_ranks for _ in numbers]
        readers = list(zip(replicas, numbers, strict=True))
        check_replicas(difference, readers, self._ranks)

    def _plan_reads(self) -> Reason | None:
        """Plan the reads of all buckets, if the present plan is outdated.

        Returns:
            The reason of a failure, or None.
        """
        traced, buckets, plan = self._source_map.traced, self._cutter.buckets, self._plan
        if plan is not None and plan.traced is traced and plan.buckets == buckets:
            return None

        def plan_buckets() -> list[list[ShardRead | SpreadRead]]:
            return [bucket_reads(bucket.layout, traced) for bucket in buckets]

        reads, reason = attempt(plan_buckets, NotTraceable)
        self._plan = None if reads is None else PullPlan(traced, buckets, reads)
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
            tables = self._ranks.gather(own_table)
            plan, readers, first = self._plan, self._own_readers, self._first_reader
            assert plan is not None, "the plan has located this rank's memory"
            self._locations, reason = self._ranks.step(
                partial(ParameterLocations.of, plan, snapshot, tables, readers, first)
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
        sources = self._source_map.current(weights, self._plan.traced)
        if empties_storages(weights):
            # The parameters return in other memory, so the names of earlier blocks are outdated.
            self._block_names = BlockNames()
        share = partial(self._share_block, shares, handles)
        table = share_shards(self._plan.traced, sources, self._device, own_rank(), share)
        return SourcesSnapshot(sources), table

    def _share_block(
        self, shares: bool, handles: list[BufferHandle], block: Block, member: torch.UntypedStorage
    ) -> tuple[str, tuple[BufferHandle, ...]]:
        """Return a block's name, and a handle for each engine rank if `shares`, else no handle."""
        name, num = self._block_names.name_of(block, member), self._num_readers if shares else 0
        try:
            block_handles = tuple(share_block(block, member) for _ in range(num))
        except ValueError as error:  # memory of a kind that has no handles
            raise NotTraceable(str(error)) from error
        handles += block_handles
        for handle in block_handles:
            self._record(handle)
        return name, block_handles


@dataclass(eq=False)
class PulledBuckets(SyncSource, Delivery):
    """The buckets of one sync, read in the trainer ranks' parameters.

    The engines may keep the memory of the parameters mapped after the sync.
    """

    is_collective = False
    asks_for_arrangements = False

    _route: Pull
    _locations: ParameterLocations
    _weights: Iterable[NamedTensor]
    _report: SyncReport
    _keep_mapped: bool
    _has_announced: bool = False

    def start(self) -> None:
        """Wait for the work on this rank that writes the parameters, and hold the parameters.

        Engines may read after all ranks have taken this step. If a parameter is replaced during the
        sync, its memory is not freed while engines read.
        """
        synchronize_device(self._route._device)  # an optimizer may work on a stream of its own
        with self._report.stage("confirm"):
            self._sources = require_sources(self._weights)()

    def delivery(self, engines: Sequence[EngineRank], poll: Poll) -> Delivery:
        """Request the engines to map the parameters of all ranks with the first bucket.

        Raises:
            BlockNotMapped: an engine has unmapped a block of which no handle is left.
        """
        locations, self._has_announced = self._locations, True
        self._pairs = list(zip(engines, locations.pieces, strict=True))
        for engine, handles in zip(engines, locations.handles, strict=True):
            engine.session.map_blocks(locations.blocks, handles, keep=self._keep_mapped)
        return self

    def __iter__(self) -> Iterator[ReadyBucket]:
        return starmap(ReadyBucket, enumerate(self._route._cutter.buckets))

    def deliver(self, ready: ReadyBucket) -> None:
        for engine, pieces in self._pairs:
            with engine.naming_errors():
                engine.session.load(ready.index, ready.bucket, pieces[ready.index], read_only=True)

    def confirm(self) -> None:
        with self._report.stage("confirm"):
            self._route._confirm(self._locations, self._sources)

    def drain(self) -> None:
        """Drop the handles if the sync has failed before any engine got a handle."""
        if not self._has_announced:
            for handles in self._locations.handles:
                drop_references(handles.values())

    def end(self) -> None:
        self._report.num_pulled += len(self._route._cutter.buckets)
        self._route._note_read(self._locations, self._keep_mapped)
