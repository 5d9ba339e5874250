"""Route "pull": every engine rank reads the trainer ranks' parameters where they are.

Nothing is exported, gathered, packed or sent: an engine rank maps the parameters' memory, that of
all trainer ranks, and its load plan copies from there what it needs. Engines share the trainer
ranks' GPUs, or have others of the same node. The export is traced once (which bytes of which shard
is each tensor?), and each rank compares its own shards, bit for bit, with the full export that the
engines load (`sources.comparison`). Then it tells the others where its shards lie:

    pull.learn(exported_sync)                     # after a good one
    source = pull.choose(export, report)          # in the next ones
    pull.recover(cause, export)                   # after one that failed

An optimizer changes what is in the memory, and all of this stays true. Parameters that come back
elsewhere (`param_offload`) are located anew before each sync; the trace stays. Whatever else
changes is noticed before the engines may publish, and the sync is made again.
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
from verl_sglang_sync.sources.snapshot import (
    SourcesChanged,
    SourcesSnapshot,
    empties_storages,
    require_sources,
)


class Pull(Route):
    """Route "pull"; `record` notes a handle before it leaves this process."""

    fallback_text = "the engines do not read the trainer's parameters in place"

    def __init__(self, context: RouteContext, record: Callable[[BufferHandle], None]) -> None:
        super().__init__(context, is_wanted="pull" in context.settings.routes)
        self._record = record
        self._block_names = BlockNames()
        self._plan: PullPlan | None = None
        self._is_colocated = context.is_colocated
        self._num_readers = 0  # engine ranks of all trainer ranks
        self._own_readers = range(0)  # which of them are this rank's
        # If None, the next sync locates the parameters and makes new handles.
        self._locations: ParameterLocations | None = None
        self._blocks_read: frozenset[str] = frozenset()  # by the last pulled sync
        self._any_can_read = True  # some engine rank of the last exported sync could, in place

    def _source(self, weights: Iterable[NamedTensor], report: SyncReport) -> SyncSource | None:
        if not self._is_colocated and not self._ranks.all(not self._have_changed()):
            warn_once("weight sync: full export for this sync, as the set of engines changed")
            return None
        if self.state is RouteState.PROVEN and not self._num_syncs:
            self.check_replicas(weights)  # an optimizer has stepped since the proof
        if empties_storages(weights) or self._locations is None:
            reason = self._locate(weights, shares=True)
            if reason is not None and (reason.is_final or self.state is RouteState.LEARNT):
                self.refuse(reason)
            elif reason is not None:
                warn_once(f"weight sync: full export for this sync: {reason}")
            if reason is not None:
                return None
        assert self._locations is not None, "no reason, so it was located"
        # The trainer cannot free what an engine has mapped, and must where it offloads parameters:
        # the engines keep blocks mapped only if the sync before read the same ones.
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
        reasons = self.why_not_in_place(sync.loaded)
        found = [reason for reason in dict.fromkeys(reasons) if reason is not None]
        for reason in found:
            num = f"{reasons.count(reason)} of {len(reasons)} engine ranks"
            warn_once(f"{num} cannot read the trainer's parameters in place: {reason}")
        self.reason = ", ".join(found) or None
        return not found and self.prepare(sync)

    def why_not_in_place(self, loaded: Sequence[Loaded]) -> list[str | None]:
        """By engine rank of all trainer ranks: why its replica cannot read in place; collective."""
        readers, reasons = self._readers(), dict[int, str]()
        assert len(readers) == len(loaded), "an outcome of each of this rank's engine ranks"
        for reader, outcome in zip(readers, loaded, strict=True):
            if outcome.host != host_id():
                reasons[reader.replica] = "an engine is on another node"
            elif not outcome.may_read_in_place:
                reasons.setdefault(reader.replica, "an engine has no load plan")
        own = [reasons.get(reader.replica) for reader in readers]
        hosts, of_ranks = zip(*self._ranks.gather((host_id(), own)), strict=True)
        several = "the trainer's ranks are on several nodes" if len(set(hosts)) > 1 else None
        found = [reason or several for reason in chain(*of_ranks)]
        self._any_can_read = None in found
        return found

    def prepare(self, sync: ExportedSync) -> bool:
        """Prepare the route after `forget`, for engine ranks that can all read in place."""
        weights = sync.weights
        nums = self._ranks.gather(len(sync.loaded))
        first = sum(nums[: own_rank()])
        self._num_readers, self._own_readers = sum(nums), range(first, first + len(sync.loaded))
        self._prepared_for = self._readers()
        own = self._difference(sync) or self._plan_reads()
        reason = self._ranks.joined(self._ranks.gather(own))
        return self._conclude(reason or self._locate(weights, shares=False))

    def recover(self, cause: BaseException | None, weights: Iterable[NamedTensor]) -> Recovery:
        cannot_map = None
        if isinstance(cause, EngineCannotMap):
            cannot_map = Reason(str(cause), is_final=True)
        if (agreed := self._ranks.joined(self._ranks.gather(cannot_map))) is not None:
            self.refuse(agreed)
            return Recovery.EXPORT
        has_moved = cause is None or isinstance(cause, SourcesChanged | BlockNotMapped)
        # In disaggregated mode the sessions are others: see `RemoteEngines.abandon`.
        if self._is_colocated and self._ranks.all(has_moved):
            state = self.state
            self.forget()
            if self._locate(weights, shares=False) is None:
                self.state = state
                return Recovery.AGAIN
        return super().recover(cause, weights)

    def forget(self) -> None:
        """The next sync is exported, and no block counts as mapped: engines may have let go."""
        super().forget()
        self._locations = None

    def note_unmapped(self) -> None:
        self._locations = None

    def _note_read(self, locations: ParameterLocations, keep_mapped: bool) -> None:
        """Remember, after a good sync, which blocks the engines have read and keep mapped."""
        self._blocks_read = frozenset(locations.blocks)
        used = replace(locations, handles=tuple({} for _ in locations.handles))
        self._locations = used if keep_mapped else None

    def _confirm(self, locations: ParameterLocations, sources: Mapping[str, torch.Tensor]) -> None:
        """Raise `SourcesChanged` unless the parameters are what and where they were located."""
        assert self._plan is not None, "a route is proven with a plan"
        if self._cutter.buckets != self._plan.buckets:
            raise SourcesChanged("the export is cut into other buckets")
        locations.snapshot.require_unchanged(sources)

    def _difference(self, sync: ExportedSync) -> Reason | None:
        """How the full export and this rank's shards differ; collective. Another export is made if
        that of the sync was not compared, or what was traced for that does not hold any more.
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
            now, _ = self._ranks.step(
                partial(self._source_map.current, weights, traced), passing=(SourcesChanged,)
            )
            if now is not None:
                self._check_replicas(traced, now)

    def _check_replicas(self, traced: TracedExport, now: Mapping[str, torch.Tensor]) -> None:
        """Raise `WeightSyncError` if the TP ranks of an engine would hold parts of different
        models; collective.
        """
        difference = differing_replicas(traced, now, self._ranks, self._device)
        numbers = [self._first_reader + reader for reader in self._own_readers]
        near = [reader for reader in self._readers() if reader.reads_in_place]
        replicas: list[object] = [reader.replica for reader in near or self._readers()]
        if self._is_colocated:
            replicas = [self._ranks.replica_ranks for _ in numbers]
        readers = list(zip(replicas, numbers, strict=True))
        check_replicas(difference, readers, self._ranks)

    def _plan_reads(self) -> Reason | None:
        """Find the buckets' bytes in the shards, unless the plan holds; why some are not there."""
        traced, buckets, plan = self._source_map.traced, self._cutter.buckets, self._plan
        if plan is not None and plan.traced is traced and plan.buckets == buckets:
            return None
        reads, reason = attempt(
            lambda: [bucket_reads(bucket.layout, traced) for bucket in buckets], NotTraceable
        )
        self._plan = None if reads is None else PullPlan(traced, buckets, reads)
        return reason

    def _locate(self, weights: Iterable[NamedTensor], *, shares: bool) -> Reason | None:
        """Find all ranks' parameters where they are now; collective; returns why engines cannot
        read.

        Args:
            shares: make the handles that engines need; only in the sync that uses them, as their
                memory lives until then. False: only find out whether this can be done.
        """
        self._locations = None
        made: list[BufferHandle] = []
        found, reason = self._ranks.step(
            partial(self._own_memory, weights, shares, made),
            NotTraceable,
            passing=(SourcesChanged,),
        )
        if found is not None and shares:
            snapshot, own_table = found
            tables = self._ranks.gather(own_table)
            plan, readers, first = self._plan, self._own_readers, self._first_reader
            assert plan is not None, "this rank's memory was found by it"
            self._locations, reason = self._ranks.step(
                partial(ParameterLocations.of, plan, snapshot, tables, readers, first)
            )
        if reason is not None:
            drop_references(made)  # no engine is given them
        return reason

    def _own_memory(
        self, weights: Iterable[NamedTensor], shares: bool, made: list[BufferHandle]
    ) -> tuple[SourcesSnapshot, MemoryTable]:
        """This rank's parameters: recognised later, and told to the others.

        Args:
            made: gets the handles that are made.
        """
        assert self._plan is not None, "nothing was traced"
        now = self._source_map.current(weights, self._plan.traced)
        if empties_storages(weights):  # the names of what was there before say nothing now
            self._block_names = BlockNames()
        share = partial(self._share_block, shares, made)
        table = share_shards(self._plan.traced, now, self._device, own_rank(), share)
        return SourcesSnapshot(now), table

    def _share_block(
        self, shares: bool, made: list[BufferHandle], block: Block, member: torch.UntypedStorage
    ) -> tuple[str, tuple[BufferHandle, ...]]:
        """A block's name, and a handle for each engine rank, or none if none are wanted."""
        name, num = self._block_names.name_of(block, member), self._num_readers if shares else 0
        try:
            handles = tuple(share_block(block, member) for _ in range(num))
        except ValueError as error:  # memory of a kind that has no handles
            raise NotTraceable(str(error)) from error
        made += handles
        for handle in handles:
            self._record(handle)
        return name, handles


@dataclass(eq=False)
class PulledBuckets(SyncSource, Delivery):
    """Buckets that lie in the trainer ranks' parameters, which engines may keep mapped."""

    is_collective = False
    asks_for_arrangements = False

    _route: Pull
    _locations: ParameterLocations
    _weights: Iterable[NamedTensor]
    _report: SyncReport
    _keep_mapped: bool
    _has_announced: bool = False

    def start(self) -> None:
        """Wait for what still writes the parameters: once all ranks have, any engine may read.

        The parameters are held until the sync ends: one that is replaced meanwhile is not freed
        while engines read it.
        """
        synchronize_device(self._route._device)  # an optimizer may work on a stream of its own
        with self._report.stage("confirm"):
            self._sources = require_sources(self._weights)()

    def delivery(self, engines: Sequence[EngineRank], poll: Poll) -> Delivery:
        """Have the engines map the parameters of all ranks with the first bucket. Raises
        `BlockNotMapped` if one has let go of a block of which no handle is left.
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
        """Drop the handles that no engine was given: the sync failed before."""
        if not self._has_announced:
            drop_references(chain.from_iterable(each.values() for each in self._locations.handles))

    def end(self) -> None:
        self._report.num_pulled += len(self._route._cutter.buckets)
        self._route._note_read(self._locations, self._keep_mapped)
