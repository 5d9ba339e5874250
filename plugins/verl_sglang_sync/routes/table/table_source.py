"""One sync by the copy table: the engine ranks' requests to load shards, and what is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang_loader.common.copies.strided import synchronize_device
from sglang_loader.common.shared_memory import drop_references
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.route import RouteContext, Sending, SyncSource
from verl_sglang_sync.routes.table.located import ParameterLocations, TablePlan
from verl_sglang_sync.routes.table.shard_sending import ShardSending
from verl_sglang_sync.routes.table.transports import RoundsInSync
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sources.host_memory import HOST_MEMORY
from verl_sglang_sync.sources.optimizer_steps import OPTIMIZER_STEPS
from verl_sglang_sync.sources.snapshot import SourcesChanged, require_sources
from verl_sglang_sync.trainer_ranks import world_size

LONG_COPY_BYTES = 4 << 30
"""A GPU takes longer to copy a model of as many bytes than the trainer to list its parameters."""


@dataclass(eq=False, kw_only=True)
class TableSource(SyncSource):
    """One sync by the copy table.

    The engines may keep the memory of the parameters mapped after the sync.

    Attributes:
        sending: sends the shards that engine ranks cannot map. None if no engine rank of any
            trainer rank is sent shards.
        positions: of this rank's engine ranks among all engine ranks.
        round_bytes: about the largest size of a round.
        keeps_mapped: the engines keep the blocks mapped that they read.
        note_read: is called when the engines have published what they have read.
    """

    context: RouteContext
    plan: TablePlan
    locations: ParameterLocations
    sending: ShardSending | None
    positions: Sequence[int]
    round_bytes: int
    weights: Iterable[NamedTensor]
    report: SyncReport
    keeps_mapped: bool
    note_read: Callable[[], None]
    _parameters: Mapping[str, torch.Tensor] | None = None
    _has_announced: bool = False
    _rounds: RoundsInSync | None = None

    def __post_init__(self) -> None:
        self.is_collective = self.sending is not None

    def start(self) -> None:
        """Wait for the work on this rank that writes the parameters, and hold their memory.

        Engines may read after all ranks have taken this step. If a parameter is replaced during the
        sync, its memory is not freed while engines read. Whether one was replaced before is found
        by `confirm`, as engines read.

        Raises:
            SourcesChanged: the memory of a parameter was freed, or the parameters cannot be listed,
                which `confirm` finds for a large model.
        """
        self._steps = OPTIMIZER_STEPS.count()
        synchronize_device(self.context.device)  # an optimizer may work on a stream of its own
        # Held until this object goes, at the end of the session.
        self._held = self.locations.snapshot.hold()
        # The trainer lists its parameters in milliseconds. These are free while the engines copy.
        # If the engines copy for a shorter time, they are free while the engines join.
        nbytes = sum(bucket.payload_bytes for bucket in self.context.cutter.buckets)
        if nbytes < LONG_COPY_BYTES:
            with self.report.stage("confirm"):
                self._parameters = require_sources(self.weights)()

    def send(self, sessions: Sending) -> None:
        """Request the engines to load all shards, and send those that an engine cannot map.

        Raises:
            BlockNotMapped: an engine has unmapped a block of which no handle is left.
        """
        # From here on an engine may have got a handle, and `drain` drops none.
        locations, self._has_announced, engines = self.locations, True, sessions.engine_ranks
        triples = zip(engines, locations.blocks, locations.handles, strict=True)
        for engine, blocks, handles in triples:
            engine.session.map_blocks(blocks, handles, keep=self.keeps_mapped)
        for engine, bases, host in zip(engines, locations.bases, locations.hosts, strict=True):
            with engine.naming_errors():
                engine.session.load_shards(
                    locations.weight_map,
                    bases,
                    host=host,
                    num_ranks=world_size(),
                    round_bytes=self.round_bytes,
                    # The engine rank sends its list of rounds only if the digest differs.
                    # None: nothing is sent, and the engine rank makes no list.
                    rounds=engine.known.rounds_digest if engine.known.is_sent_to else None,
                )
        if self.sending is not None:
            self._rounds = self.sending.prepare(
                self.plan.traced, self.weights, engines, self.positions, self.report
            )
            self._rounds.run()
        # For the report and for `Finish`: nothing was packed.
        for bucket in self.context.cutter.buckets:
            sessions.count(bucket)

    def confirm(self) -> None:
        """Raise `SourcesChanged` if parameters were replaced, have moved, or cannot be listed."""
        with self.report.stage("confirm"):
            # A proof by export between two syncs by this route may have cut other buckets.
            if self.context.cutter.buckets != self.plan.buckets:
                raise SourcesChanged("the export is cut into other buckets")
            parameters = self._parameters
            if parameters is None:
                parameters = require_sources(self.weights)()
            self.locations.snapshot.require_unchanged(parameters)

    def confirm_unwritten(self) -> None:
        """Raise `SourcesChanged` if an optimizer has made a step since `start`."""
        OPTIMIZER_STEPS.require_none_since(self._steps)

    def drain(self) -> None:
        """Drop the handles if the sync has failed before any engine got a handle.

        If rounds have begun, take part in the others.
        """
        if not self._has_announced:
            for handles in self.locations.handles:
                drop_references(handles.values())
        if self._rounds is not None:
            self._rounds.drain()

    def end(self) -> None:
        num_buckets = len(self.context.cutter.buckets)
        if self.locations.all_blocks:
            self.report.num_pulled += num_buckets
            self.report.host_memory_bytes = HOST_MEMORY.nbytes
        if self._rounds is not None:
            self._rounds.count(self.report, num_buckets)
        self.note_read()

    def close(self) -> None:
        if self.sending is not None:
            self.sending.free()
