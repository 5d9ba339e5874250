"""Where all trainer ranks' parameters are, as each rank's engine ranks are told of them.

A `TracedExport` says which bytes of which parameter an exported tensor is, and which rank holds
them; it stays true for as long as the model does. Where those bytes are in memory is another
question: parameters that are offloaded come back elsewhere.

    plan = PullPlan(traced, buckets, [bucket_reads(bucket.layout, traced) for bucket in buckets])
    table = share_shards(traced, sources(), device, rank, share)  # each rank, of its own
    tables = group.all_gather(table)                  # then every rank knows all of them
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
"""More blocks than this are not mapped: each costs an engine a mapping and a file descriptor."""

NO_BYTES = (-1, 0)


@dataclass(frozen=True, slots=True)
class SpreadRead:
    """A tensor, from byte `start` of the bucket on, whose bytes lie apart in its parameter."""

    start: int
    origin: Origin


def bucket_reads(layout: BucketLayout, traced: TracedExport) -> list[ShardRead | SpreadRead]:
    """Which shards hold a bucket's bytes, in ascending order; pure. `NotTraceable` if unknown.

    Bytes that are consecutive in a shard and in the bucket are one read, of several tensors even.
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
    """True if two reads of a shard are as far apart in it as in the bucket, gaps included."""
    read, after = last.read, part.read
    return (
        (last.holders, read.tensor) == (part.holders, after.tensor)
        and read.offset < after.offset
        and after.offset - read.offset == after.start - read.start
    )


@dataclass(frozen=True)
class PullPlan:
    """Which bytes of which shards the buckets are; true until the parameters are replaced."""

    traced: TracedExport
    buckets: list[Bucket]
    reads: list[list[ShardRead | SpreadRead]]


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """One rank's shards, as the others are told of them.

    Attributes:
        blocks: by name of a memory block in which shards lie, what each engine rank maps; every
            handle is used once.
        shards: by parameter: position of its block, and where in that the shard begins; `NO_BYTES`
            where the rank holds nothing of it.
    """

    blocks: Mapping[str, tuple[BufferHandle, ...]]
    shards: tuple[tuple[int, int], ...]


def share_shards(
    traced: TracedExport,
    now: Mapping[str, torch.Tensor],
    device: torch.device,
    rank: int,
    share: Callable[[Block, torch.UntypedStorage], tuple[str, tuple[BufferHandle, ...]]],
) -> MemoryTable:
    """What the other ranks are to know of this rank's shards.

    Args:
        now: the trainer's tensors.
        device: on which the parameters must be; memory elsewhere cannot be read in place.
        share: given a block and a storage in it: the block's name, and its handles by engine rank.

    Raises:
        NotTraceable, ValueError: a shard lies in no memory that another process can map.
    """
    table = BlockTable(device)
    blocks: dict[Block, tuple[int, torch.UntypedStorage]] = {}  # its position, a storage in it
    places = []
    for parameter in traced.parameters:
        name, place = parameter.source, NO_BYTES
        shard = memory_of(now[name]) if parameter.owners.is_held_by(rank) else None
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
    """Where the engine rank that has this `number` among all finds every bucket, encoded; a slot is
    a position in all ranks' blocks.
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
    """Where all ranks' parameters are at present, for this rank's engine ranks (`readers`).

    Attributes:
        snapshot: of this rank's parameters.
        blocks: names of those of all ranks in which they lie; engines map them all.
        handles: by reader and block; each is used once. Empty where all blocks are mapped.
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
        """Where this rank's engine ranks, `readers` among all, find every bucket."""
        blocks = [block for table in tables for block in table.blocks.items()]
        return cls(
            snapshot,
            tuple(name for name, _ in blocks),
            tuple({name: each[reader] for name, each in blocks if each} for reader in readers),
            tuple(pieces_for(plan, tables, first_reader + reader) for reader in readers),
        )
