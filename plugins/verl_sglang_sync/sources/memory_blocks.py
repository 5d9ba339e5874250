"""Blocks of memory as other processes map them: a CUDA IPC handle is of a whole `cudaMalloc` block.

torch divides blocks into storages; a block is mapped once for all tensors in it. A block is not
freed as long as one storage in it lives, so each shared block has a name that is valid as long as
such a storage, and then gets a new one.
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
    """Memory of `nbytes` from `address` on, which is mapped as a whole."""

    address: int
    nbytes: int

    @classmethod
    def of(cls, storage: torch.UntypedStorage) -> Block:
        return cls(storage.data_ptr(), storage.nbytes())


class BlockTable:
    """The blocks of one device at the time that this is made."""

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
        """The block that contains a storage, or None."""
        if self._device.type == "cpu":  # shared memory: every storage is a file of its own
            return storage
        i = bisect_right(self._addresses, storage.address) - 1
        if i < 0:
            return None
        block = self._blocks[i]
        fits = storage.address + storage.nbytes <= block.address + block.nbytes
        return block if fits else None


class BlockNames:
    """Names blocks for the sessions of this process, each allocation once."""

    def __init__(self) -> None:
        self._names: dict[Block, tuple[str, StorageWeakRef]] = {}

    def name_of(self, block: Block, member: torch.UntypedStorage) -> str:
        """The block's name; a new name is valid as long as `member`, a storage in the block."""
        name, ref = self._names.get(block, ("", None))
        if ref is None or ref.expired():  # a weak reference keeps its identity taken
            self._names = {b: v for b, v in self._names.items() if not v[1].expired()}
            name = secrets.token_hex(8)
            self._names[block] = name, StorageWeakRef(member)
        return name


def share_block(block: Block, member: torch.UntypedStorage) -> BufferHandle:
    """A handle of a whole block, made from `member`, a storage in it.

    Raises:
        ValueError: other processes cannot map the memory, or `member` is not in this block.
    """
    handle = share_storage(member)
    if not isinstance(handle, CudaHandle):
        return handle
    shift = member.data_ptr() - block.address
    if handle.offset < shift:
        raise ValueError(f"the storage begins {handle.offset} bytes into its block, not {shift}")
    return msgspec.structs.replace(handle, offset=handle.offset - shift, nbytes=block.nbytes)
