"""Owners of bytes: which trainer rank holds which bytes of a parameter.

A parameter is the concatenation of its shards (`Owners`). FSDP2's shards are torch's chunks along
the first dimension, of which the last may be short or empty. Megatron's shards are the parameters
of tensor and expert parallel ranks, with a copy on each data parallel rank.

An exported tensor is bytes of a parameter (`Origin`), or of several in turn, and a parameter lies
in shards on the trainer's ranks. All functions here compute with plain numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sglang_loader.common.regions.compose import ByteMap


class Origin(msgspec.Struct, frozen=True):
    """The bytes of a parameter that an exported tensor, or a part of it, consists of.

    Attributes:
        parameter: number of the parameter in the `TracedExport`.
        bytes: offsets in the concatenation of the parameter's shards.
    """

    parameter: int
    bytes: ByteMap


class NotOwned(ValueError):
    """The reason why a parameter's bytes cannot be assigned to ranks."""


class Owners(msgspec.Struct, frozen=True):
    """The shards of a parameter, and the ranks that hold them.

    Attributes:
        starts: offset in the parameter of each shard that is not empty, ascending.
        holders: for each shard the ranks that hold it, ascending.
        nbytes: size of the parameter.
    """

    starts: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]
    nbytes: int

    def is_held_by(self, rank: int) -> bool:
        return any(rank in ranks for ranks in self.holders)

    def shard_of(self, offset: int) -> int:
        """Return the number of the shard that contains a byte."""
        return bisect_right(self.starts, offset) - 1

    def owner_of(self, shard: int, reader: int) -> int:
        """Return the holder from which a rank reads a shard."""
        return nearest(self.holders[shard], reader)

    def range_of(self, shard: int) -> tuple[int, int]:
        """Return the offsets at which a shard begins and ends."""
        last = shard + 1 == len(self.starts)
        return self.starts[shard], self.nbytes if last else self.starts[shard + 1]


def nearest(holders: Sequence[int], reader: int) -> int:
    """Return the holder from which a rank reads, itself or one on its node if possible."""
    # The holder whose number has the longest binary prefix in common with the reader's. Nodes have
    # 2, 4 or 8 consecutive ranks. Without a holder on the node, readers spread over the holders.
    return min(holders, key=reader.__xor__)


def held_by_all(nbytes: int, world_size: int) -> Owners:
    """Return the owners of a parameter that every rank holds as a whole."""
    return Owners((0,), (tuple(range(world_size)),), nbytes)


def shards_of_rows(num_rows: int, row_bytes: int, ranks: Sequence[int]) -> Owners:
    """Return the owners of `num_rows` rows that torch has chunked over `ranks`, in this order."""
    size = -(-num_rows // len(ranks))  # as torch.chunk: rounded up, so the last may be empty
    shards = [(i * size, rank) for i, rank in enumerate(ranks) if i * size < num_rows and row_bytes]
    return Owners(
        tuple(row * row_bytes for row, _ in shards),
        tuple((rank,) for _, rank in shards),
        num_rows * row_bytes,
    )


def owners_of(parameter: DTensor, world_size: int) -> Owners:
    """Return the owners of a parameter.

    Raises:
        NotOwned: the parameter is not contiguous, not on a one-dimensional mesh of all ranks, or
            placed neither as `Shard(0)` nor as `Replicate()`.
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
    # torch's own computation is the reference for `shards_of_rows`.
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
    actual = (offset[0] * row_bytes, nbytes) if nbytes else (0, 0)
    if tuple(local.shape) != tuple(shape) or actual != expected:
        raise NotOwned(
            f"its shard begins at byte {actual[0]} and has {actual[1]}, expected {expected}"
        )
