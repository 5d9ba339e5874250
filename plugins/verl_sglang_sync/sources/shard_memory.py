"""Where a trainer rank's parameters lie, said so that every engine rank of the node can map them.

A `TracedExport` says which bytes of which parameter an exported tensor is, and which rank holds
them; it stays true for as long as the model does. Where those bytes are in memory is
another question: parameters that are offloaded come back elsewhere.

    shards = locate(traced, sources(), device, rank)          # each rank, of its own memory
    table = shards.share(block_names, mapped, 4, folder.record)  # one handle per block and reader
    tables = group.all_gather(table)                          # then every rank knows all of them
    reads = bucket_reads(layout, traced, rank)                # pure: which shard holds which bytes
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.arrangement import Arrangement
from sglang_loader.common.shared_memory import BufferHandle
from verl_sglang_sync.sources.export_trace import NotTraceable, TracedExport
from verl_sglang_sync.sources.known_sources import memory_of
from verl_sglang_sync.sources.memory_blocks import Block, BlockNames, BlockTable, share_block
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


def bucket_reads(
    layout: BucketLayout, traced: TracedExport, rank: int
) -> list[ShardRead | SpreadRead]:
    """Which shards hold a bucket's bytes, in ascending order. Pure.

    Bytes that are consecutive in a shard and in the bucket are one read, of several tensors even.

    Args:
        layout: of the bucket.
        traced: where its tensors come from.
        rank: whose engine reads.

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
        for part in shard_reads(alone, origins, traced.owners, rank):
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
        (last.owner, read.tensor) == (part.owner, after.tensor)
        and read.offset < after.offset
        and after.offset - read.offset == after.start - read.start
    )


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """One rank's shards, as the others are told of them.

    Attributes:
        host: equal on ranks of the same running machine.
        blocks: names of the memory blocks in which the shards lie.
        shards: by parameter: position of its block, and where in that the shard begins; `NO_BYTES`
            where the rank holds nothing of it.
        handles: by reading rank, then by block: what its engine maps; each is used once. None
            where the engines have the block mapped. Empty: none were made.
    """

    host: str
    blocks: tuple[str, ...]
    shards: tuple[tuple[int, int], ...]
    handles: tuple[tuple[BufferHandle | None, ...], ...]

    def handles_for(self, reader: int) -> tuple[BufferHandle | None, ...]:
        """By block."""
        return self.handles[reader] if self.handles else (None,) * len(self.blocks)


class LocatedShards:
    """This rank's shards at one time; keeps their memory alive while it is needed.

    Args:
        shards: flat bytes by parameter.
        blocks: the block of each; None where a shard is empty.
    """

    def __init__(self, shards: Sequence[torch.Tensor], blocks: Sequence[Block | None]) -> None:
        self.shards = shards
        self._members: dict[Block, torch.UntypedStorage] = {}
        for shard, block in zip(shards, blocks, strict=True):
            if block is not None:
                self._members.setdefault(block, shard.untyped_storage())
        positions = {block: i for i, block in enumerate(self._members)}
        self._places = tuple(
            NO_BYTES if block is None else (positions[block], shard.data_ptr() - block.address)
            for shard, block in zip(shards, blocks, strict=True)
        )

    def share(
        self,
        names: BlockNames,
        mapped: Container[str],
        num_readers: int,
        record: Callable[[BufferHandle], None],
    ) -> MemoryTable:
        """What the other ranks are to know.

        Args:
            names: of this process's blocks.
            mapped: names of those that the engines have mapped.
            num_readers: how many engine ranks map every block.
            record: notes a handle before it leaves this process.

        Raises:
            ValueError: the memory cannot be shared.
        """
        named = {
            names.name_of(block, member): (block, member) for block, member in self._members.items()
        }
        handles = tuple(
            tuple(None if name in mapped else share_block(*named[name]) for name in named)
            for _ in range(num_readers)
        )
        for handle in chain.from_iterable(handles):
            if handle is not None:
                record(handle)
        return MemoryTable(host_id(), tuple(named), self._places, handles)


def locate(
    traced: TracedExport, now: Mapping[str, torch.Tensor], device: torch.device, rank: int
) -> LocatedShards:
    """Find the blocks of this rank's shards.

    Args:
        traced: the parameters, and who holds them.
        now: the trainer's tensors.
        device: of the engine on this rank; memory elsewhere cannot be read in place.
        rank: this one.

    Raises:
        NotTraceable: a shard lies in no memory that another process can map.
    """
    table, shards, blocks = BlockTable(device), [], []
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    for parameter in traced.parameters:
        name, block = parameter.source, None
        shard = memory_of(now[name]) if parameter.owners.is_held_by(rank) else nothing
        if shard.numel():
            block = table.block_of(Block.of(shard.untyped_storage()))
            if block is None or not _is_mappable(shard, device):
                raise NotTraceable(f"{name} on {shard.device} cannot be mapped by other processes")
        shards.append(shard)
        blocks.append(block)
    if len(set(blocks)) > MAX_BLOCKS:
        raise NotTraceable(f"the parameters lie in {len(set(blocks))} blocks of memory")
    return LocatedShards(shards, blocks)


def host_id() -> str:
    """Equal in processes on the same running machine, whatever containers they are in."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _is_mappable(shard: torch.Tensor, device: torch.device) -> bool:
    if shard.device.type != device.type:
        return False
    if device.type == "cpu":
        return bool(shard.is_shared())
    return device.index in (None, shard.device.index)
