"""A buffer's handle, typed: lets the engine's process map memory of the trainer's process.

torch shares storages between processes through `torch.multiprocessing`, which pickles them. The
fields of a CUDA tensor that travel are the same here, without the pickle: an IPC handle with
torch's own reference counter (the owner's memory is not reused before the receiver let go of it).
Of a CPU tensor, only the name of its shared-memory file travels. Torch's own way of mapping that
removes a file that nobody else uses, and ends the process where the file is gone already, as it is
when a trainer was killed; so the file is mapped directly, and stays its owner's.

    handle = share_storage(tensor.untyped_storage())    # trainer; each handle for one receiver
    flat = map_buffer(handle, device)                   # engine: uint8 of shape [handle.nbytes]

Mapping a CUDA handle of memory that this process still has mapped gives the same addresses.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from functools import cache
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec
import torch
from torch.multiprocessing import reductions


class CpuHandle(msgspec.Struct, frozen=True, kw_only=True, tag="cpu", forbid_unknown_fields=True):
    """Shared memory by name (`UntypedStorage._share_filename_cpu_`), as in `shm_open(3)`."""

    nbytes: int
    name: str


SHARED_MEMORY = Path("/dev/shm")
HEADER_NBYTES = 64
"""Torch's own counter in front of the bytes of a shared-memory file."""


class CudaHandle(msgspec.Struct, frozen=True, kw_only=True, tag="cuda", forbid_unknown_fields=True):
    """What `TypedStorage._share_cuda_` returns.

    Attributes:
        nbytes: of the storage.
        gpu: UUID, because the two processes may number their devices differently.
        allocation: IPC handle of the `cudaMalloc` block.
        offset: of the storage in that block.
        counter_file: torch's reference counter, a shared-memory file and a position in it.
        counter_offset: see `counter_file`.
        event: IPC handle of the event after which the memory may be read.
        event_sync_required: wait for `event`.
    """

    nbytes: int
    gpu: str
    allocation: bytes
    offset: int
    counter_file: str
    counter_offset: int
    event: bytes
    event_sync_required: bool


BufferHandle = CpuHandle | CudaHandle


class CannotMap(Exception):
    """Another process's memory cannot be mapped here; the text says whose, and why."""


MANAGER_IS_LATE = "manager connection has timed out"
MANAGER_ATTEMPTS = 10


def share_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Move a CPU tensor into shared memory; returns it. torch gives its own manager of such memory,
    a process, one second to answer: a busy host needs more.
    """
    for attempt in range(1, MANAGER_ATTEMPTS + 1):
        try:
            tensor.share_memory_()
            break
        except RuntimeError as error:
            if MANAGER_IS_LATE not in str(error) or attempt == MANAGER_ATTEMPTS:
                raise
    return tensor


def share_storage(storage: torch.UntypedStorage) -> BufferHandle:
    """Make a handle of a storage; it must stay alive until the receiver has let go of it.

    Raises:
        ValueError: memory that other processes cannot map, as it is.
    """
    if storage.device.type == "cpu":
        if not storage.is_shared():
            raise ValueError("only shared memory of the CPU can be mapped by another process")
        if torch.multiprocessing.get_sharing_strategy() != "file_system":
            raise ValueError(
                "torch's sharing strategy is 'file_descriptor', with which memory moves when it is "
                "shared by name: call torch.multiprocessing.set_sharing_strategy('file_system')"
            )
        _, name, nbytes = storage._share_filename_cpu_()
        return CpuHandle(nbytes=nbytes, name=name.decode())
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)
    device, allocation, nbytes, offset, counter, counter_offset, event, sync = typed._share_cuda_()
    return CudaHandle(
        nbytes=nbytes,
        gpu=gpu_uuid(device),
        allocation=allocation,
        offset=offset,
        counter_file=counter.decode(),
        counter_offset=counter_offset,
        event=event,
        event_sync_required=sync,
    )


def map_buffer(handle: BufferHandle, device: torch.device) -> torch.Tensor:
    """Map a handle's memory into this process: contiguous uint8 of shape `[handle.nbytes]`.

    Memory of another GPU of the node is read over NVLink, or over PCIe where there is none. It is
    mapped for the GPU that reads it, whether this process sees the other one or not: CUDA would let
    only the owner's GPU read what is mapped for that.

    Raises:
        CannotMap: this process has no access to it.
    """
    with torch.inference_mode(False), torch.no_grad():
        try:
            mapped = _mapped(handle, device)
            if isinstance(handle, CudaHandle) and handle.gpu != gpu_uuid(mapped.get_device()):
                _of_peers[handle.gpu][mapped.untyped_storage().data_ptr()] = mapped
            return mapped
        except (OSError, RuntimeError, ValueError) as error:  # torch's own are RuntimeErrors
            where = f"on GPU {handle.gpu}" if isinstance(handle, CudaHandle) else "of the CPU"
            raise CannotMap(f"{handle.nbytes} bytes {where} cannot be mapped: {error}") from error


_of_peers: dict[str, WeakValueDictionary[int, torch.Tensor]] = defaultdict(WeakValueDictionary)
"""By GPU, what is mapped of others' memory, by address: CUDA says that it is the reader's own."""


def peer_of(view: torch.Tensor) -> str | None:
    """UUID of the other GPU on which the memory lies; None: it does not lie on another one."""
    address = view.untyped_storage().data_ptr()
    return next((gpu for gpu, mapped in _of_peers.items() if address in mapped), None)


def _mapped(handle: BufferHandle, device: torch.device) -> torch.Tensor:
    if isinstance(handle, CpuHandle):
        if not handle.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        with (SHARED_MEMORY / Path(handle.name).name).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), HEADER_NBYTES + handle.nbytes)
        return torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER_NBYTES)
    mapped: torch.Tensor = reductions.rebuild_cuda_tensor(
        torch.Tensor,
        (handle.nbytes,),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        torch.cuda.current_device() if device.index is None else device.index,
        handle.allocation,
        handle.nbytes,
        handle.offset,
        False,
        handle.counter_file.encode(),
        handle.counter_offset,
        handle.event,
        handle.event_sync_required,
    )
    return mapped


@cache
def host_id() -> str:
    """Equal in processes on the same running machine, whatever containers they are in."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def gpu_uuid(index: int) -> str:
    """UUID of a CUDA device of this process."""
    return str(torch.cuda.get_device_properties(index).uuid)
