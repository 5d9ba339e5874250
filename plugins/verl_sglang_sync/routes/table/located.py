"""The locations of all trainer ranks' parameters in memory, in the form that engines get.

A `TracedExport` maps each exported tensor to bytes of a parameter, and to the ranks that hold these
bytes. The map holds as long as the model. Memory addresses change more often: parameters that are
offloaded return at other addresses.

    plan = TablePlan.of(traced, buckets)
    table = share_shards(traced, sources(), device, rank, share)  # this rank's shards
    tables = ranks.gather(table)                                  # all ranks' shards
    locations = ParameterLocations.of(plan, snapshot, tables, wires, readers)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang_loader.common.host_memory import HostHandle
from sglang_loader.common.shared_memory import BufferHandle
from verl_sglang_sync.engine.session import StoredBytes
from verl_sglang_sync.routes.table.weight_map_builder import (
    NO_BYTES,
    MemoryTable,
    bases_for,
    weight_map_of,
)
from verl_sglang_sync.routes.table.wires import Wires
from verl_sglang_sync.sources.bucket_cutter import Bucket
from verl_sglang_sync.sources.export_trace import NotTraceable, TracedExport
from verl_sglang_sync.sources.host_memory import HOST_MEMORY
from verl_sglang_sync.sources.memory_blocks import Block, BlockTable
from verl_sglang_sync.sources.snapshot import SourcesSnapshot, memory_of

MAX_BLOCKS = 8192
"""The largest number of blocks to map. A block costs an engine a mapping and a file descriptor."""

NO_MEMORY = MemoryTable({}, ())
"""The table of a rank whose memory no engine rank maps."""


@dataclass(frozen=True)
class TablePlan:
    """The weight map of all buckets, valid until the trace or the buckets change."""

    traced: TracedExport
    buckets: list[Bucket]
    weight_map: StoredBytes

    @classmethod
    def of(cls, traced: TracedExport, buckets: list[Bucket]) -> TablePlan:
        """Plan the buckets.

        Raises:
            NotTraceable: the shards of a tensor are unknown.
        """
        return cls(traced, buckets, weight_map_of(buckets, traced))


def share_shards(
    traced: TracedExport,
    sources: Mapping[str, torch.Tensor],
    device: torch.device,
    rank: int,
    share: Callable[[Block, torch.UntypedStorage], tuple[str, Mapping[int, BufferHandle]]],
) -> MemoryTable:
    """Create the table of this rank's shards.

    Args:
        sources: the trainer's tensors by name.
        device: the device of the parameters. Engines cannot read memory of another device in place.
        share: returns the name of a block, and its handles by engine rank. The arguments are the
            block and a storage in it.

    Raises:
        NotTraceable, ValueError: another process cannot map the memory of a shard.
    """
    table = BlockTable(device)
    blocks: dict[Block, tuple[int, torch.UntypedStorage]] = {}  # a position and a storage
    places = []
    for parameter in traced.parameters:
        name, place = parameter.source, NO_BYTES
        shard = memory_of(sources[name]) if parameter.owners.is_held_by(rank) else None
        if shard is not None and shard.numel():
            storage = shard.untyped_storage()
            block = table.block_of(Block.of(storage))
            if block is None or not _is_mappable(shard, device):
                raise NotTraceable(f"{name} on {shard.device} cannot be mapped by other processes")
            # torch's allocator puts many shards into one block, which is mapped once.
            position, _ = blocks.setdefault(block, (len(blocks), storage))
            place = position, shard.data_ptr() - block.address
        places.append(place)
    if len(blocks) > MAX_BLOCKS:
        num = f"{len(blocks)} blocks of memory, more than {MAX_BLOCKS}"
        raise NotTraceable(f"the parameters lie in {num}")
    shared = dict(share(block, storage) for block, (_, storage) in blocks.items())
    return MemoryTable(shared, tuple(places))


def _is_mappable(shard: torch.Tensor, device: torch.device) -> bool:
    if shard.device.type != device.type:
        return False
    # Only shared memory has a handle on a CPU. On a GPU all memory has one.
    if device.type == "cpu":
        return shard.is_shared() or HOST_MEMORY.file_of(shard.data_ptr()) is not None
    return device.index in (None, shard.device.index)


@dataclass(frozen=True)
class ParameterLocations:
    """The present locations of all ranks' parameters, for this rank's engine ranks (`readers`).

    Attributes:
        snapshot: identifies this rank's parameters, to detect changes.
        blocks: by reader, the names of all blocks that the reader maps, of all trainer ranks.
        handles: by reader, the handles of blocks by name. A handle is used once. Empty if the
            reader has mapped all blocks.
        all_blocks: the names of all blocks that an engine rank maps, equal on all trainer ranks.
        stays: True if all of them are files of host memory. The trainer can free a file that an
            engine maps.
        weight_map: see `TablePlan`.
        bases: by reader, see `bases_for`.
        hosts: by reader, its host, which is that of all blocks that it maps.
    """

    snapshot: SourcesSnapshot
    blocks: tuple[tuple[str, ...], ...]
    handles: tuple[Mapping[str, BufferHandle], ...]
    all_blocks: frozenset[str]
    stays: bool
    weight_map: StoredBytes
    bases: tuple[StoredBytes, ...]
    hosts: tuple[str, ...]

    @classmethod
    def of(
        cls,
        plan: TablePlan,
        snapshot: SourcesSnapshot,
        tables: Sequence[MemoryTable],
        wires: Wires,
        readers: Sequence[int],
    ) -> ParameterLocations:
        """Locate every shard for this rank's engine ranks.

        Args:
            tables: the tables of all trainer ranks.
            readers: the positions of this rank's engine ranks among all engine ranks.

        Raises:
            NotTraceable: a trainer rank does not hold the shard that the trace says.
        """
        mapped = {
            reader: [
                block
                for rank, table in enumerate(tables)
                if wires.is_mapped(rank, reader)
                for block in table.blocks.items()
            ]
            for reader in readers
        }
        return cls(
            snapshot,
            tuple(tuple(name for name, _ in mapped[reader]) for reader in readers),
            tuple(
                {name: handles[reader] for name, handles in mapped[reader] if handles}
                for reader in readers
            ),
            frozenset(name for table in tables for name in table.blocks),
            _are_on_host(tables),
            plan.weight_map,
            tuple(bases_for(plan.traced, tables, wires, reader) for reader in readers),
            tuple(wires.reader_hosts[reader] for reader in readers),
        )


def _are_on_host(tables: Sequence[MemoryTable]) -> bool:
    handles = [
        h for table in tables for by_reader in table.blocks.values() for h in by_reader.values()
    ]
    return bool(handles) and all(isinstance(handle, HostHandle) for handle in handles)
