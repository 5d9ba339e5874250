"""Where a trainer rank's parameters lie, said so that every engine rank of the node can map them.

A `TracedExport` says which bytes of which parameter an exported tensor is, and which rank holds
them; it stays true for as long as the model does. Where those bytes are in memory is
another question: parameters that are offloaded come back elsewhere.

    shards = locate(names, sources(), device)                 # each rank, of its own memory
    table = shards.share(block_names, mapped, 4, folder.record)  # one handle per block and reader
    tables = group.all_gather(table)                          # then every rank knows all of them
    pieces = pieces_of(layout, traced, rank)                  # pure: which shard holds which bytes
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.shared_memory import BufferHandle
from verl_sglang_sync.sources.export_trace import NotTraceable, TracedExport
from verl_sglang_sync.sources.known_sources import memory_of
from verl_sglang_sync.sources.memory_blocks import Block, BlockNames, BlockTable, share_block
from verl_sglang_sync.sources.owners import Owners

MAX_BLOCKS = 8192
"""More blocks than this are not mapped: each costs an engine a mapping and a file descriptor."""

NO_BYTES = (-1, 0)


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """Consecutive bytes of a bucket that lie in one rank's shard of one parameter.

    Attributes:
        rank: who holds the shard.
        parameter: number of the parameter in the traced export.
        offset: of the first byte in the shard.
        start: of the first byte in the bucket's layout.
        nbytes: length.
    """

    rank: int
    parameter: int
    offset: int
    start: int
    nbytes: int


def pieces_of(layout: BucketLayout, traced: TracedExport, rank: int) -> list[ShardPiece]:
    """Which shards hold a bucket's bytes, by ascending `start`; pure.

    Args:
        layout: of the bucket.
        traced: where its tensors come from.
        rank: whose own copy is read of a parameter that every rank has all of.

    Raises:
        NotTraceable: a tensor was not traced, or its bytes are not consecutive in a parameter.
    """
    pieces: list[ShardPiece] = []
    for tensor in sorted(layout.tensors, key=lambda tensor: tensor.offset):
        origin = traced.find(tensor).origin
        if not tensor.nbytes:
            continue
        if not origin.bytes.is_dense:
            name = traced.parameters[origin.parameter].source
            raise NotTraceable(f"the bytes of {tensor.name} are not consecutive in {name}")
        owners = traced.parameters[origin.parameter].owners
        for part in shard_parts(origin.bytes.offset, tensor.nbytes, owners):
            owner = rank if part.owner is None else part.owner
            start = tensor.offset + part.start
            _append(pieces, ShardPiece(owner, origin.parameter, part.offset, start, part.nbytes))
    return pieces


@dataclass(frozen=True, slots=True)
class ShardPart:
    """Consecutive bytes of a tensor that lie in one shard.

    Attributes:
        owner: who holds the shard; None: every rank does.
        offset: of the first byte in the shard.
        start: of the first byte in the tensor.
        nbytes: length.
    """

    owner: int | None
    offset: int
    start: int
    nbytes: int


def shard_parts(first: int, nbytes: int, owners: Owners) -> Iterator[ShardPart]:
    """Cut consecutive bytes of a parameter where its shards end; pure.

    Args:
        first: of the bytes, in the parameter.
        nbytes: how many.
        owners: of the parameter.
    """
    at, shard = first, owners.shard_of(first)
    while at < first + nbytes:
        begin, end = owners.range_of(shard)
        stop = min(first + nbytes, end)
        yield ShardPart(
            owners.ranks[shard] if owners.ranks else None, at - begin, at - first, stop - at
        )
        at, shard = stop, shard + 1


def _append(pieces: list[ShardPiece], piece: ShardPiece) -> None:
    """Add a piece, as part of the last one where it continues that, gaps of the layout included."""
    last = pieces[-1] if pieces else None
    if (
        last is not None
        and (last.rank, last.parameter) == (piece.rank, piece.parameter)
        and last.offset < piece.offset
        and piece.offset - last.offset == piece.start - last.start
    ):
        nbytes = piece.start + piece.nbytes - last.start
        pieces[-1] = ShardPiece(last.rank, last.parameter, last.offset, last.start, nbytes)
    else:
        pieces.append(piece)


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """One rank's shards, as the others are told of them.

    Attributes:
        host: equal on ranks of the same running machine.
        blocks: names of the memory blocks in which the shards lie.
        shards: by parameter: position of its block, and where in that the shard begins; `NO_BYTES`
            where the rank holds nothing of it.
        handles: by reading rank, then by block: what its engine maps; each is used once. None
            where the engines have the block mapped.
    """

    host: str
    blocks: tuple[str, ...]
    shards: tuple[tuple[int, int], ...]
    handles: tuple[tuple[BufferHandle | None, ...], ...]


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
    names: Sequence[str], now: Mapping[str, torch.Tensor], device: torch.device
) -> LocatedShards:
    """Find the blocks of this rank's shards.

    Args:
        names: of the parameters among `now`, by number.
        now: the trainer's tensors.
        device: of the engine on this rank; memory elsewhere cannot be read in place.

    Raises:
        NotTraceable: a shard lies in no memory that another process can map.
    """
    table, shards, blocks = BlockTable(device), [], []
    for name in names:
        shard, block = memory_of(now[name]), None
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
