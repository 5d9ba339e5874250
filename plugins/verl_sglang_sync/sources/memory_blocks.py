"""Memory as other processes map it: a CUDA IPC handle is always that of a whole `cudaMalloc` block.

torch cuts blocks into storages; mapping a block once serves every tensor in it. A block stays
mapped to the right memory for as long as one storage in it lives, so each shared block is named
after such a storage, and gets a new name when that one is gone.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from dataclasses import dataclass

import msgspec
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sglang_loader.common.shared_memory import BufferHandle, CudaHandle, share_storage


@dataclass(frozen=True, slots=True)
class Block:
    """`nbytes` of memory from `address` on, mapped as one."""

    address: int
    nbytes: int

    @classmethod
    def of(cls, storage: torch.UntypedStorage) -> Block:
        return cls(storage.data_ptr(), storage.nbytes())


class BlockTable:
    """The blocks of one device, as they are now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[Block] = []
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._blocks = sorted(
                (
                    Block(segment["address"], segment["total_size"])
                    for segment in torch.cuda.memory_snapshot()
                    if segment["device"] == index and not segment.get("is_expandable", False)
                ),
                key=lambda block: block.address,
            )
        self._addresses = [block.address for block in self._blocks]

    def block_of(self, storage: Block) -> Block | None:
        """The block in which a storage lies; None if it lies in none."""
        if self._device.type == "cpu":  # shared memory: every storage is a file of its own
            return storage
        i = bisect_right(self._addresses, storage.address) - 1
        if i < 0:
            return None
        block = self._blocks[i]
        fits = storage.address + storage.nbytes <= block.address + block.nbytes
        return block if fits else None


class BlockNames:
    """Names blocks for the sessions of this process: one name for one allocation."""

    def __init__(self) -> None:
        self._names: dict[Block, tuple[str, StorageWeakRef]] = {}

    def name_of(self, block: Block, member: torch.UntypedStorage) -> str:
        """The block's name. A new one is valid while `member` lives, a storage in the block."""
        name, ref = self._names.get(block, ("", None))
        if ref is None or ref.expired():  # a weak reference keeps its identity taken
            self._names = {b: v for b, v in self._names.items() if not v[1].expired()}
            name = secrets.token_hex(8)
            self._names[block] = name, StorageWeakRef(member)
        return name


def share_block(block: Block, member: torch.UntypedStorage) -> BufferHandle:
    """A handle of a whole block, by way of one storage in it; raises `ValueError` where other
    processes cannot map the memory, or it is no longer that block.
    """
    handle = share_storage(member)
    if not isinstance(handle, CudaHandle):
        return handle
    shift = member.data_ptr() - block.address
    if handle.offset < shift:
        raise ValueError(f"the storage begins {handle.offset} bytes into its block, not {shift}")
    return msgspec.structs.replace(handle, offset=handle.offset - shift, nbytes=block.nbytes)
