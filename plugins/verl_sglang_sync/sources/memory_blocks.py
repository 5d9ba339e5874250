"""Blocks of memory, as other processes map them.

A CUDA IPC handle stands for a whole `cudaMalloc` block, which torch divides into storages. Another
process maps a block once for all tensors in it. torch does not free a block while a storage in it
lives. So a shared block keeps its name while one such storage lives, and gets a new name after.

A file of host memory (`host_memory`) is a block, too, with the file's own name.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from dataclasses import dataclass
from operator import attrgetter

import msgspec
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sglang_loader.common.shared_memory import BufferHandle, CudaHandle, share_storage
from verl_sglang_sync.sources.host_memory import HOST_MEMORY


@dataclass(frozen=True, slots=True)
class Block:
    """Memory of `nbytes` from `address` on, which another process maps as a whole."""

    address: int
    nbytes: int

    @classmethod
    def of(cls, storage: torch.UntypedStorage) -> Block:
        return cls(storage.data_ptr(), storage.nbytes())


class BlockTable:
    """Table of the blocks of one device, as they are when the table is made."""

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
                key=attrgetter("address"),
            )
        self._addresses = [block.address for block in self._blocks]

    def block_of(self, storage: Block) -> Block | None:
        """Return the block that contains a storage, or None if no block does."""
        if (file := HOST_MEMORY.file_of(storage.address)) is not None:
            return Block(file.address, file.nbytes)
        if self._device.type == "cpu":  # each storage is a file of shared memory of its own
            return storage
        i = bisect_right(self._addresses, storage.address) - 1
        if i < 0:
            return None
        block = self._blocks[i]
        fits = storage.address + storage.nbytes <= block.address + block.nbytes
        return block if fits else None


class BlockNames:
    """Registry of the names of this process's blocks. Every allocation has a name of its own."""

    def __init__(self) -> None:
        self._names: dict[Block, tuple[str, StorageWeakRef]] = {}

    def name_of(self, block: Block, member: torch.UntypedStorage) -> str:
        """Return the block's name. A new name is valid while `member`, a storage in it, lives."""
        if (file := HOST_MEMORY.file_of(block.address)) is not None:
            return file.name
        name, ref = self._names.get(block, ("", None))
        # After `member` the block may have been freed, and another be at its address. While the
        # weak reference lives, no new storage gets the identity of `member`.
        if ref is None or ref.expired():
            self._names = {b: v for b, v in self._names.items() if not v[1].expired()}
            name = secrets.token_hex(8)
            self._names[block] = name, StorageWeakRef(member)
        return name


def share_block(block: Block, member: torch.UntypedStorage) -> BufferHandle:
    """Make the handle of a whole block from `member`, a storage in it.

    Raises:
        ValueError: other processes cannot map the memory, or `member` is not in this block.
    """
    if (file := HOST_MEMORY.file_of(block.address)) is not None:
        return file.handle
    handle = share_storage(member)
    if not isinstance(handle, CudaHandle):
        return handle
    # torch's handle describes the storage. Widen it to the block.
    shift = member.data_ptr() - block.address
    if handle.offset < shift:
        raise ValueError(f"the storage begins {handle.offset} bytes into its block, not {shift}")
    return msgspec.structs.replace(handle, offset=handle.offset - shift, nbytes=block.nbytes)
