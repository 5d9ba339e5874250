"""The transfer plan: for each byte that an engine rank reads, which trainer rank's shard has it.

A parameter is its shards' memory, one behind the other (`Owners`). FSDP2 shards along the first
dimension: torch's chunks, of which the last may be short or empty. Megatron's shards are the
parameters of tensor and expert parallel ranks, of which each data parallel rank has a replica.

An engine rank reads bytes of exported tensors (`Arrangement`), a tensor is bytes of a parameter
(`Origin`), and a parameter lies in shards on the trainer's ranks. Here the three are composed:

    for part in shard_reads(arrangement, origins, owners):
        part.holders                    # these ranks hold,
        part.read.tensor                # of this parameter,
        part.read.offset                # in its shard, what goes to
        part.read.start                 # this byte of the arranged buffer

Routes "exchange" and "send" send what an engine has said it reads, route "pull" tells the engine
where a bucket as a whole is (`whole_bucket`). Pure: numbers in, numbers out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.arrangement import Arrangement, Read
from sglang_loader.common.regions.compose import ByteMap, compose_read
from sglang_loader.common.regions.geometry import split_copy


@dataclass(frozen=True, slots=True)
class Origin:
    """Bytes of a parameter (its number in the `TracedExport`), of all its shards put together."""

    parameter: int
    bytes: ByteMap


class NotOwned(ValueError):
    """Why a parameter's bytes cannot be assigned to ranks."""


@dataclass(frozen=True, slots=True)
class Owners:
    """Who holds a parameter; its dense bytes are cut into shards.

    Attributes:
        starts: first byte of every shard that is not empty, ascending.
        holders: by shard: the ranks that have it, ascending.
        nbytes: of the parameter.
    """

    starts: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]
    nbytes: int

    def is_held_by(self, rank: int) -> bool:
        return any(rank in ranks for ranks in self.holders)

    def shard_of(self, offset: int) -> int:
        """Which shard a byte lies in."""
        return bisect_right(self.starts, offset) - 1

    def owner_of(self, shard: int, reader: int) -> int:
        return nearest(self.holders[shard], reader)

    def range_of(self, shard: int) -> tuple[int, int]:
        """First byte of a shard, and where it ends."""
        last = shard + 1 == len(self.starts)
        return self.starts[shard], self.nbytes if last else self.starts[shard + 1]


def nearest(holders: Sequence[int], reader: int) -> int:
    """Which replica a rank reads: its own, else that of the rank whose number has the longest
    binary prefix in common with its own.

    Nodes have 2, 4 or 8 ranks that follow each other, so it is one of the reader's node where there
    is any; replicas elsewhere share the readers.
    """
    return min(holders, key=reader.__xor__)


def everyone(nbytes: int, world_size: int) -> Owners:
    return Owners((0,), (tuple(range(world_size)),), nbytes)


def shards_of_rows(num_rows: int, row_bytes: int, ranks: Sequence[int]) -> Owners:
    """Torch's chunks of `num_rows` rows over `ranks`, in this order."""
    size = -(-num_rows // len(ranks))
    shards = [(i * size, rank) for i, rank in enumerate(ranks) if i * size < num_rows and row_bytes]
    return Owners(
        tuple(row * row_bytes for row, _ in shards),
        tuple((rank,) for _, rank in shards),
        num_rows * row_bytes,
    )


def owners_of(parameter: DTensor, world_size: int) -> Owners:
    """Who holds a parameter: contiguous, on one line of all ranks, `Shard(0)` or `Replicate()`."""
    mesh, local = parameter.device_mesh, parameter.to_local()
    ranks = mesh.mesh.flatten().tolist()
    if mesh.ndim != 1 or sorted(ranks) != list(range(world_size)):
        raise NotOwned(f"its mesh {tuple(mesh.shape)} is not one line of all {world_size} ranks")
    if not local.is_contiguous() or not parameter.is_contiguous():
        raise NotOwned(f"its memory has strides {parameter.stride()}")
    nbytes = parameter.numel() * parameter.element_size()
    (placement,) = parameter.placements
    if placement == Replicate():
        return everyone(nbytes, world_size)
    if placement != Shard(0):
        raise NotOwned(f"it is placed as {placement}, neither Shard(0) nor Replicate()")
    owners = shards_of_rows(parameter.shape[0], nbytes // max(parameter.shape[0], 1), ranks)
    _check_own_shard(parameter, local, owners)
    return owners


def _check_own_shard(parameter: DTensor, local: torch.Tensor, owners: Owners) -> None:
    """Our chunks must be torch's: every rank looks at its own."""
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    nbytes = local.numel() * local.element_size()
    rank = torch.distributed.get_rank()
    expected = (0, 0)
    if (rank,) in owners.holders:
        start, stop = owners.range_of(owners.holders.index((rank,)))
        expected = start, stop - start
    row_bytes = owners.nbytes // max(parameter.shape[0], 1)
    found = (offset[0] * row_bytes, nbytes) if nbytes else (0, 0)
    if tuple(local.shape) != tuple(shape) or found != expected:
        raise NotOwned(
            f"its shard begins at byte {found[0]} and has {found[1]}, expected {expected}"
        )


@dataclass(frozen=True, slots=True)
class ShardRead:
    """Bytes of one shard, which `holders` have: of parameter `read.tensor`, `read.offset` on."""

    holders: tuple[int, ...]
    read: Read

    def owner(self, reader: int) -> int:
        return nearest(self.holders, reader)


def whole_bucket(layout: BucketLayout) -> Arrangement:
    """Of a bucket that is not arranged: all of its tensors, where its layout has them."""
    return tuple(
        Read(i, 0, (), tensor.nbytes, tensor.offset) for i, tensor in enumerate(layout.tensors)
    )


def shard_reads(
    arrangement: Arrangement,
    origins: Sequence[Origin],
    owners: Sequence[Owners],
    only: int | None = None,
) -> Iterator[ShardRead]:
    """An arrangement's reads, cut where shards end, in their order.

    Args:
        origins: of the bucket's tensors, by position in its layout.
        owners: by parameter.
        only: leave out parameters of which this rank holds nothing.
    """
    for read in arrangement:
        if not read.nbytes:
            continue
        origin = origins[read.tensor]
        held = owners[origin.parameter]
        if only is not None and not held.is_held_by(only):
            continue
        wanted = Read(origin.parameter, read.offset, read.dims, read.run, read.start)
        for part in compose_read(origin.bytes, wanted):
            if part.stop <= held.range_of(held.shard_of(part.offset))[1]:
                yield _shard_read(part, held)
                continue
            for copy in split_copy(part.as_copy(), held.starts):
                yield _shard_read(Read.from_copy(copy, part.tensor), held)


def _shard_read(read: Read, held: Owners) -> ShardRead:
    shard = held.shard_of(read.offset)
    offset = read.offset - held.starts[shard]
    within = Read(read.tensor, offset, read.dims, read.run, read.start)
    return ShardRead(held.holders[shard], within)
