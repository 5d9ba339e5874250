"""Handles of memory, by which the engine's process maps memory of the trainer's process.

torch shares storages between processes through `torch.multiprocessing`, which pickles them. A
`CudaHandle` has the same fields without the pickle: an IPC handle with torch's own reference
counter. The counter keeps the owner from reusing the memory before the receiver has released it. A
`CpuHandle` is the name of a shared-memory file, which is mapped directly. torch would remove a file
that no other process uses, and end the process if the file is already gone, as after a trainer was
killed. A `HostHandle` is a file of host memory that GPUs read, see `host_memory`.

    handle = share_storage(tensor.untyped_storage())    # trainer; each handle for one receiver
    flat = map_buffer(handle, device)                   # engine: uint8 of shape [handle.nbytes]

Mapping a CUDA handle of memory that this process still has mapped gives the same addresses.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec
import torch
from torch.multiprocessing import reductions

from sglang_loader.common.host_memory import HostHandle, map_file


class CpuHandle(msgspec.Struct, frozen=True, kw_only=True, tag="cpu", forbid_unknown_fields=True):
    """Shared memory by name (`UntypedStorage._share_filename_cpu_`), as in `shm_open(3)`."""

    nbytes: int
    name: str


SHARED_MEMORY = Path("/dev/shm")
HEADER_NBYTES = 64
"""Size of torch's own counter in front of the bytes of a shared-memory file."""
COUNTER_NBYTES = 8
"""Size of one reference counter in the file `CudaHandle.counter_file`."""


class CudaHandle(msgspec.Struct, frozen=True, kw_only=True, tag="cuda", forbid_unknown_fields=True):
    """The result of `TypedStorage._share_cuda_`.

    Attributes:
        nbytes: size of the storage.
        gpu: UUID, because the two processes may number their devices differently.
        allocation: IPC handle of the `cudaMalloc` block.
        offset: offset of the storage in that block.
        counter_file: torch's reference counter, a shared-memory file and a position in it.
        counter_offset: see `counter_file`.
        event: IPC handle of the event after which the memory may be read.
        event_sync_required: True if the reader must wait for `event`.
    """

    nbytes: int
    gpu: str
    allocation: bytes
    offset: int
    counter_file: str
    counter_offset: int
    event: bytes
    event_sync_required: bool


BufferHandle = CpuHandle | CudaHandle | HostHandle


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
MAP_FAILED = ctypes.c_void_p(-1).value


class CannotMap(Exception):
    """Another process's memory that cannot be mapped here. The text has place and reason."""


MANAGER_IS_LATE = "manager connection has timed out"
MANAGER_ATTEMPTS = 10


def share_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Move a CPU tensor into shared memory, and return the tensor."""
    # On a busy host torch's own manager process may not answer within torch's limit of a second.
    for attempt in range(1, MANAGER_ATTEMPTS + 1):
        try:
            tensor.share_memory_()
            break
        except RuntimeError as error:
            if MANAGER_IS_LATE not in str(error) or attempt == MANAGER_ATTEMPTS:
                raise
    return tensor


def share_storage(storage: torch.UntypedStorage) -> BufferHandle:
    """Make a handle of a storage, which must stay alive until the receiver has released it.

    Raises:
        ValueError: other processes cannot map this memory.
    """
    if storage.device.type == "cpu":
        if not storage.is_shared():
            raise ValueError("only shared memory of the CPU can be mapped by another process")
        if torch.multiprocessing.get_sharing_strategy() != "file_system":
            raise ValueError(
                "torch's sharing strategy is 'file_descriptor', with which memory moves when it is "
                "shared by name: call torch.multiprocessing.set_sharing_strategy('file_system')"
            )
        # The storage is shared already, so this only returns the file's name.
        _, name, nbytes = storage._share_filename_cpu_()
        return CpuHandle(nbytes=nbytes, name=name.decode())
    # torch increments its reference counter here. The receiver of the handle decrements it.
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


def drop_references(handles: Iterable[BufferHandle]) -> list[BufferHandle]:
    """Drop the references of handles whose receiver is dead, or will never map them.

    Call this only if no receiver is left, and once for a handle. If a receiver counts down later,
    the counter wraps, and the memory is never freed.

    Returns:
        The handles whose counters are not on this host, or are gone.
    """
    # torch frees the memory of a GPU when the receiver of each handle has counted down. A receiver
    # that was killed never counts down.
    left: list[BufferHandle] = []
    for handle in handles:
        if isinstance(handle, CudaHandle):
            try:
                with (SHARED_MEMORY / Path(handle.counter_file).name).open("r+b") as counters:
                    counters.seek(HEADER_NBYTES + COUNTER_NBYTES * handle.counter_offset)
                    counters.write(bytes(COUNTER_NBYTES))
            except FileNotFoundError:
                left.append(handle)
    return left


def is_counted_here(handle: BufferHandle) -> bool:
    """Return True if this process has made the handle's counter."""
    # torch puts the process's id into the name of the file.
    named = f"torch_{os.getpid()}_"
    return isinstance(handle, CudaHandle) and Path(handle.counter_file).name.startswith(named)


def map_buffer(handle: BufferHandle, device: torch.device) -> torch.Tensor:
    """Map a handle's memory into this process: contiguous uint8 of shape `[handle.nbytes]`.

    Memory of another GPU of the node is read over NVLink or PCIe. The memory is mapped for
    `device`, which reads it, even if this process does not see the other GPU.

    Raises:
        CannotMap: this process has no access to the memory.
    """
    with torch.inference_mode(False), torch.no_grad():
        try:
            mapped = _mapped(handle, device)
            # The tensor's device is the reader's GPU. Record the GPU that the memory lies on.
            if isinstance(handle, CudaHandle) and handle.gpu != gpu_uuid(mapped.get_device()):
                _peer_memory[handle.gpu][mapped.untyped_storage().data_ptr()] = mapped
            return mapped
        except (OSError, RuntimeError, ValueError) as error:  # torch's own are RuntimeErrors
            where = f"on GPU {handle.gpu}" if isinstance(handle, CudaHandle) else "of the CPU"
            raise CannotMap(f"{handle.nbytes} bytes {where} cannot be mapped: {error}") from error


_peer_memory: dict[str, WeakValueDictionary[int, torch.Tensor]] = defaultdict(WeakValueDictionary)
"""Mapped memory of other GPUs, by UUID and address. CUDA reports the reader's GPU as its device."""


def peer_gpu_of(view: torch.Tensor) -> str | None:
    """Return the UUID of the other GPU that the memory lies on, or None."""
    address = view.untyped_storage().data_ptr()
    return next((gpu for gpu, mapped in _peer_memory.items() if address in mapped), None)


def _mapped(handle: BufferHandle, device: torch.device) -> torch.Tensor:
    if isinstance(handle, HostHandle):
        return map_file(handle, device)
    if isinstance(handle, CpuHandle):
        if not handle.nbytes:  # an empty file cannot be mapped
            return torch.empty(0, dtype=torch.uint8)
        # `Path.name` keeps a forged handle from leaving the folder of shared memory.
        return _mapped_file(SHARED_MEMORY / Path(handle.name).name, handle.nbytes)
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


def _mapped_file(path: Path, nbytes: int) -> torch.Tensor:
    """Map the bytes behind the header of a shared-memory file. No file stays open."""
    # Python's mmap would keep a descriptor for each of thousands of parameters.
    size = HEADER_NBYTES + nbytes
    with path.open("r+b") as file:
        if (present := os.fstat(file.fileno()).st_size) < size:
            raise OSError(f"{path} has {present} bytes, not {size}")
        address = _libc.mmap(
            None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file.fileno(), 0
        )
    if address == MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # The tensor keeps the array alive. The process's end unmaps the memory anyway.
    array = (ctypes.c_uint8 * nbytes).from_address(address + HEADER_NBYTES)
    weakref.finalize(array, _libc.munmap, address, size).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


@cache
def host_id() -> str:
    """Return an id of the running machine, the same in all of its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def gpu_uuid(index: int) -> str:
    """Return the UUID of a CUDA device of this process."""
    return str(torch.cuda.get_device_properties(index).uuid)
