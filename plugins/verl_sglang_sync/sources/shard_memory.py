"""Where a trainer rank's parameters lie, said so that every engine rank of the node can map them.

A `TracedExport` says which bytes of which parameter an exported tensor is, and which rank holds
them; it stays true for as long as the model does. Where those bytes are in memory is
another question: parameters that are offloaded come back elsewhere.

    shards, table = share_shards(traced, sources(), device, rank, share)  # each rank, of its own
    tables = group.all_gather(table)                  # then every rank knows all of them
    reads = bucket_reads(layout, traced)              # pure: which shard holds which bytes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.arrangement import Arrangement
from sglang_loader.common.shared_memory import BufferHandle
from verl_sglang_sync.sources.export_trace import NotTraceable, TracedExport
from verl_sglang_sync.sources.known_sources import memory_of
from verl_sglang_sync.sources.memory_blocks import Block, BlockTable
from verl_sglang_sync.sources.owners import Origin
from verl_sglang_sync.sources.transfer_plan import ShardRead, shard_reads, whole_bucket

MAX_BLOCKS = 8192
"""More blocks than this are not mapped: each costs an engine a mapping and a file descriptor."""

NO_BYTES = (-1, 0)


@dataclass(frozen=True, slots=True)
class SpreadRead:
    """A tensor whose bytes are not consecutive in its parameter.

    Attributes:
        start: first byte in the bucket.
        origin: what the tensor is.
    """

    start: int
    origin: Origin


def bucket_reads(layout: BucketLayout, traced: TracedExport) -> list[ShardRead | SpreadRead]:
    """Which shards hold a bucket's bytes, in ascending order. Pure.

    Bytes that are consecutive in a shard and in the bucket are one read, of several tensors even.

    Args:
        traced: where its tensors come from.

    Raises:
        NotTraceable: a tensor was not traced.
    """
    origins = traced.origins_of(layout)
    joined: list[ShardRead | SpreadRead] = []
    for read in whole_bucket(layout).reads:
        origin = origins[read.tensor]
        if not origin.bytes.is_dense and read.nbytes:
            joined.append(SpreadRead(read.start, origin))
            continue
        alone = Arrangement((read,), layout.nbytes)
        for part in shard_reads(alone, origins, traced.owners):
            last = joined[-1] if joined else None
            if isinstance(last, ShardRead) and _continues(last, part):
                run = part.read.start + part.read.run - last.read.start
                joined[-1] = replace(last, read=replace(last.read, run=run))
            else:
                joined.append(part)
    return joined


def _continues(last: ShardRead, part: ShardRead) -> bool:
    """True if bytes of a shard and of the bucket go on alike, gaps of the layout included."""
    read, after = last.read, part.read
    return (
        (last.holders, read.tensor) == (part.holders, after.tensor)
        and read.offset < after.offset
        and after.offset - read.offset == after.start - read.start
    )


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """One rank's shards, as the others are told of them.

    Attributes:
        blocks: names of the memory blocks in which the shards lie.
        shards: by parameter: position of its block, and where in that the shard begins; `NO_BYTES`
            where the rank holds nothing of it.
        handles: by block, then by engine rank: what that maps; each is used once. None where the
            engines have the block mapped.
    """

    blocks: tuple[str, ...]
    shards: tuple[tuple[int, int], ...]
    handles: tuple[tuple[BufferHandle | None, ...], ...]


def share_shards(
    traced: TracedExport,
    now: Mapping[str, torch.Tensor],
    device: torch.device,
    rank: int,
    share: Callable[[Block, torch.UntypedStorage], tuple[str, tuple[BufferHandle | None, ...]]],
) -> tuple[list[torch.Tensor], MemoryTable]:
    """This rank's shards, and what the other ranks are to know of them.

    Args:
        traced: the parameters, and who holds them.
        now: the trainer's tensors.
        device: on which the parameters must be; memory elsewhere cannot be read in place.
        share: given a block and a storage in it: the block's name, and its handles by engine rank.

    Returns:
        Flat bytes by parameter, which keep the memory alive, and the table.

    Raises:
        NotTraceable: a shard lies in no memory that another process can map.
        ValueError: likewise.
    """
    table, shards = BlockTable(device), []
    blocks: dict[Block, tuple[int, torch.UntypedStorage]] = {}  # its position, a storage in it
    places = []
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    for parameter in traced.parameters:
        name, place = parameter.source, NO_BYTES
        shard = memory_of(now[name]) if parameter.owners.is_held_by(rank) else nothing
        if shard.numel():
            storage = shard.untyped_storage()
            block = table.block_of(Block.of(storage))
            if block is None or not _is_mappable(shard, device):
                raise NotTraceable(f"{name} on {shard.device} cannot be mapped by other processes")
            position, _ = blocks.setdefault(block, (len(blocks), storage))
            place = position, shard.data_ptr() - block.address
        shards.append(shard)
        places.append(place)
    if len(blocks) > MAX_BLOCKS:
        raise NotTraceable(f"the parameters lie in {len(blocks)} blocks of memory")
    shared = [share(block, storage) for block, (_, storage) in blocks.items()]
    return shards, MemoryTable(
        blocks=tuple(name for name, _ in shared),
        shards=tuple(places),
        handles=tuple(of_block for _, of_block in shared),
    )


def _is_mappable(shard: torch.Tensor, device: torch.device) -> bool:
    if shard.device.type != device.type:
        return False
    if device.type == "cpu":
        return bool(shard.is_shared())
    return device.index in (None, shard.device.index)
