"""The locations of all trainer ranks' parameters in memory, in the form that engines get.

A `TracedExport` maps each exported tensor to bytes of a parameter, and to the ranks that hold these
bytes. The map holds as long as the model. Memory addresses change more often: parameters that are
offloaded return at other addresses.

    plan = PullPlan(traced, buckets, [bucket_reads(bucket.layout, traced) for bucket in buckets])
    table = share_shards(traced, sources(), device, rank, share)  # this rank's shards
    tables = ranks.gather(table)                                  # all ranks' shards
    locations = ParameterLocations.of(plan, snapshot, tables, readers, first_reader)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.session.messages import BucketPiece, encode_pieces
from sglang_loader.common.shared_memory import BufferHandle
from verl_sglang_sync.sources.bucket_cutter import Bucket
from verl_sglang_sync.sources.export_trace import NotTraceable, TracedExport
from verl_sglang_sync.sources.memory_blocks import Block, BlockTable
from verl_sglang_sync.sources.shard_reads import Origin, ShardRead, shard_reads, whole_bucket
from verl_sglang_sync.sources.snapshot import SourcesSnapshot, memory_of

MAX_BLOCKS = 8192
"""The largest number of blocks to map. A block costs an engine a mapping and a file descriptor."""

NO_BYTES = (-1, 0)
"""The entry of `MemoryTable.shards` for a parameter of which the rank holds no bytes."""


@dataclass(frozen=True, slots=True)
class SpreadRead:
    """A read of a whole tensor whose bytes lie apart in its parameter.

    Attributes:
        start: the offset of the tensor in the bucket.
    """

    start: int
    origin: Origin


def bucket_reads(layout: BucketLayout, traced: TracedExport) -> list[ShardRead | SpreadRead]:
    """List the shards that hold a bucket's bytes, in the order of the bytes. Pure.

    Bytes that are consecutive in a shard and in the bucket are one read, even of several tensors.

    Raises:
        NotTraceable: the shards of a tensor are unknown.
    """
    origins = traced.origins_of(layout)
    joined: list[ShardRead | SpreadRead] = []
    for read in whole_bucket(layout):
        origin = origins[read.tensor]
        if not origin.bytes.is_dense and read.nbytes:
            joined.append(SpreadRead(read.start, origin))
            continue
        for part in shard_reads((read,), origins, traced.owners):
            last = joined[-1] if joined else None
            if isinstance(last, ShardRead) and _continues(last, part):
                run = part.read.start + part.read.run - last.read.start
                joined[-1] = replace(last, read=replace(last.read, run=run))
            else:
                joined.append(part)
    return joined


def _continues(last: ShardRead, part: ShardRead) -> bool:
    """Return True if two reads of a shard have the same distance in the shard and in the bucket."""
    first, second = last.read, part.read
    return (
        (last.holders, first.tensor) == (part.holders, second.tensor)
        and first.offset < second.offset
        and second.offset - first.offset == second.start - first.start
    )


@dataclass(frozen=True)
class PullPlan:
    """The reads of shards that make up each bucket, valid until the trace changes."""

    traced: TracedExport
    buckets: list[Bucket]
    reads: list[list[ShardRead | SpreadRead]]


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """The locations of one rank's shards, in the form that the other ranks get.

    Attributes:
        blocks: by the name of a memory block that contains shards: one handle for each engine
            rank, or none if no handles are wanted. A handle is used once.
        shards: by parameter: the position of its block, and the offset of the shard in the block.
            `NO_BYTES` if the rank holds no bytes of the parameter.
    """

    blocks: Mapping[str, tuple[BufferHandle, ...]]
    shards: tuple[tuple[int, int], ...]


def share_shards(
    traced: TracedExport,
    sources: Mapping[str, torch.Tensor],
    device: torch.device,
    rank: int,
    share: Callable[[Block, torch.UntypedStorage], tuple[str, tuple[BufferHandle, ...]]],
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
    if device.type == "cpu":
        return bool(shard.is_shared())
    return device.index in (None, shard.device.index)


def pieces_for(plan: PullPlan, tables: Sequence[MemoryTable], number: int) -> tuple[bytes, ...]:
    """Encode the pieces of every bucket for one engine rank.

    Args:
        tables: the tables of all trainer ranks. The slot of a block is its position in the blocks
            of all tables.
        number: the number of the engine rank.
    """
    first_slots = [0, *accumulate(len(table.blocks) for table in tables)]

    def place(owner: int, parameter: int) -> tuple[int, int]:
        block, shard_start = tables[owner].shards[parameter]
        return first_slots[owner] + block, shard_start

    def piece(part: ShardRead | SpreadRead) -> BucketPiece:
        if isinstance(part, ShardRead):
            (slot, offset), read = place(part.owner(number), part.read.tensor), part.read
            return BucketPiece(slot, offset + read.offset, read.start, read.run)
        parameter, source = part.origin.parameter, part.origin.bytes
        owners, shards = plan.traced.owners[parameter], []
        for shard in range(len(owners.starts)):
            start, stop = owners.range_of(shard)
            slot, offset = place(owners.owner_of(shard, number), parameter)
            shards.append((slot, offset, stop - start))
        slot = shards[0][0]
        return BucketPiece(
            slot, source.offset, part.start, source.nbytes, source.dims, tuple(shards)
        )

    return tuple(encode_pieces([piece(part) for part in parts]) for parts in plan.reads)


@dataclass(frozen=True)
class ParameterLocations:
    """The present locations of all ranks' parameters, for this rank's engine ranks (`readers`).

    Attributes:
        snapshot: identifies this rank's parameters, to detect changes.
        blocks: the names of all blocks that contain parameters, of all ranks. Engines map them all.
        handles: by reader, the handles of blocks by name. A handle is used once. Empty if the
            reader has mapped all blocks.
        pieces: by reader and bucket, see `pieces_for`.
    """

    snapshot: SourcesSnapshot
    blocks: tuple[str, ...]
    handles: tuple[Mapping[str, BufferHandle], ...]
    pieces: tuple[tuple[bytes, ...], ...]

    @classmethod
    def of(
        cls,
        plan: PullPlan,
        snapshot: SourcesSnapshot,
        tables: Sequence[MemoryTable],
        readers: Sequence[int],
        first_reader: int,
    ) -> ParameterLocations:
        """Locate every bucket for this rank's engine ranks.

        Args:
            tables: the tables of all trainer ranks.
            readers: the positions of this rank's engine ranks among all engine ranks.
            first_reader: see `RouteContext`.
        """
        blocks = [block for table in tables for block in table.blocks.items()]
        return cls(
            snapshot,
            tuple(name for name, _ in blocks),
            tuple(
                {name: handles[reader] for name, handles in blocks if handles} for reader in readers
            ),
            tuple(pieces_for(plan, tables, first_reader + reader) for reader in readers),
        )
