"""The transfer plan: for each byte that an engine rank reads, which trainer rank's shard has it.

A parameter is the concatenation of its shards (`Owners`). FSDP2's shards are torch's chunks along
the first dimension, of which the last may be short or empty. Megatron's are the parameters of
tensor and expert parallel ranks, with a replica on each data parallel rank.

An engine rank reads bytes of exported tensors (`Arrangement`), a tensor is bytes of a parameter
(`Origin`), and a parameter lies in shards on the trainer's ranks. `shard_reads` composes the three:

    for part in shard_reads(arrangement, origins, owners):
        part.holders                    # these ranks hold,
        part.read.tensor                # of this parameter,
        part.read.offset                # in its shard, what goes to
        part.read.start                 # this byte of the arranged buffer

Routes "exchange" and "send" send the bytes of an engine's arrangement, route "pull" tells it where
all bytes of a bucket are (`whole_bucket`). Pure: numbers in, numbers out.
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
    """Bytes of a parameter, counted in its concatenated shards; `parameter`: its number in the
    `TracedExport`.
    """

    parameter: int
    bytes: ByteMap


class NotOwned(ValueError):
    """Why a parameter's bytes cannot be assigned to ranks."""


@dataclass(frozen=True, slots=True)
class Owners:
    """The shards of a parameter, and the ranks that hold them.

    Attributes:
        starts: offset of every shard that is not empty, ascending.
        holders: by shard, the ranks that have it, ascending.
        nbytes: size of the parameter.
    """

    starts: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]
    nbytes: int

    def is_held_by(self, rank: int) -> bool:
        return any(rank in ranks for ranks in self.holders)

    def shard_of(self, offset: int) -> int:
        """The shard that contains a byte."""
        return bisect_right(self.starts, offset) - 1

    def owner_of(self, shard: int, reader: int) -> int:
        return nearest(self.holders[shard], reader)

    def range_of(self, shard: int) -> tuple[int, int]:
        """Offsets at which a shard begins and ends."""
        last = shard + 1 == len(self.starts)
        return self.starts[shard], self.nbytes if last else self.starts[shard + 1]


def nearest(holders: Sequence[int], reader: int) -> int:
    """The holder that a rank reads from: itself, else the one whose number has the longest binary
    prefix in common with its own.

    Nodes have 2, 4 or 8 consecutive ranks, so that is a holder on the reader's node, if any; else
    readers are spread over the holders.
    """
    return min(holders, key=reader.__xor__)


def held_by_all(nbytes: int, world_size: int) -> Owners:
    return Owners((0,), (tuple(range(world_size)),), nbytes)


def shards_of_rows(num_rows: int, row_bytes: int, ranks: Sequence[int]) -> Owners:
    """The owners of `num_rows` rows that torch has chunked over `ranks`, in this order."""
    size = -(-num_rows // len(ranks))
    shards = [(i * size, rank) for i, rank in enumerate(ranks) if i * size < num_rows and row_bytes]
    return Owners(
        tuple(row * row_bytes for row, _ in shards),
        tuple((rank,) for _, rank in shards),
        num_rows * row_bytes,
    )


def owners_of(parameter: DTensor, world_size: int) -> Owners:
    """The owners of a parameter; raises NotOwned unless it is contiguous, on a one-dimensional mesh
    of all ranks, and placed as `Shard(0)` or `Replicate()`.
    """
    mesh, local = parameter.device_mesh, parameter.to_local()
    ranks = mesh.mesh.flatten().tolist()
    if mesh.ndim != 1 or sorted(ranks) != list(range(world_size)):
        raise NotOwned(f"its mesh {tuple(mesh.shape)} is not one line of all {world_size} ranks")
    if not local.is_contiguous() or not parameter.is_contiguous():
        raise NotOwned(f"its memory has strides {parameter.stride()}")
    nbytes = parameter.numel() * parameter.element_size()
    (placement,) = parameter.placements
    if placement == Replicate():
        return held_by_all(nbytes, world_size)
    if placement != Shard(0):
        raise NotOwned(f"it is placed as {placement}, neither Shard(0) nor Replicate()")
    owners = shards_of_rows(parameter.shape[0], nbytes // max(parameter.shape[0], 1), ranks)
    _check_own_shard(parameter, local, owners)
    return owners


def _check_own_shard(parameter: DTensor, local: torch.Tensor, owners: Owners) -> None:
    """Raise NotOwned unless this rank's shard is where `owners` has it."""
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
    """Bytes of a shard that `holders` have: `read.tensor` is the parameter, `read.offset` an offset
    in the shard.
    """

    holders: tuple[int, ...]
    read: Read

    def owner(self, reader: int) -> int:
        return nearest(self.holders, reader)


def whole_bucket(layout: BucketLayout) -> Arrangement:
    """The arrangement of a bucket that comes whole: all tensors, at their offsets in the layout."""
    return tuple(
        Read(i, 0, (), tensor.nbytes, tensor.offset) for i, tensor in enumerate(layout.tensors)
    )


def shard_reads(
    arrangement: Arrangement,
    origins: Sequence[Origin],
    owners: Sequence[Owners],
    only: int | None = None,
) -> Iterator[ShardRead]:
    """The reads of an arrangement, cut at the ends of shards, in order.

    Args:
        origins: by position of a tensor in the bucket's layout.
        owners: by parameter.
        only: skip parameters of which this rank holds no shard.
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
