"""Where a rank's shards are, and by what they are recognised in the next sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True)
class Mark:
    """By which a tensor of the trainer is recognised: its memory, and what it is.

    An optimizer changes what is in the memory; whoever moves a tensor, or puts another in its
    place, may have changed what the export makes of it.
    """

    storage: StorageWeakRef
    what: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Mark:
        """Mark a tensor, without keeping its memory."""
        return cls(StorageWeakRef(_local(tensor).untyped_storage()), _description(tensor))

    def fits(self, tensor: torch.Tensor) -> bool:
        """True if `tensor` is the one that was marked."""
        if self.storage.expired() or self.what != _description(tensor):
            return False
        return bool(self.storage == StorageWeakRef(_local(tensor).untyped_storage()))


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """A shard's bytes; of a tensor that is not sharded, its storage's. Flat uint8."""
    local = _local(tensor)
    whole = torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.untyped_storage())
    if not isinstance(tensor, DTensor):
        return whole
    start, size = int(local.storage_offset()), local.element_size()
    return whole[start * size : (start + local.numel()) * size]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _description(tensor: torch.Tensor) -> tuple[Any, ...]:
    local = _local(tensor)
    what = local.data_ptr(), local.shape, local.stride(), local.dtype, local.device
    if isinstance(tensor, DTensor):
        return *what, tensor.shape, tensor.placements, tensor.device_mesh
    return what
