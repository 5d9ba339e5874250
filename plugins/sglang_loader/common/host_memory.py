"""Files of host memory without a path, which processes of one host share and GPUs read.

A trainer that offloads its parameters copies them to such a file. The engine's process maps the
file, and pins it: CUDA then shows the same bytes as memory of the GPU, which reads them over PCIe.

    file = HostFile(nbytes, device)             # trainer
    file.handle                                 # goes to the engine
    flat = map_file(file.handle, device)        # engine: uint8 of shape [nbytes] on `device`

The kernel frees a file when no process has it open or mapped. So nothing is left of a process that
was killed. The size of `/dev/shm` is no limit, because a file has no path there.

A GPU reads pinned memory by the same copy kernel as its own memory. Contiguous and strided bytes,
and those that are cast, are read in one launch, and a rank reads only its own part.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import weakref
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

PREFIX = "weight-sync-"
PORTABLE_AND_MAPPED = 3
"""Flags of `cudaHostRegister`: pinned for all GPUs of this process, and shown as their memory."""


class HostHandle(msgspec.Struct, frozen=True, kw_only=True, tag="host", forbid_unknown_fields=True):
    """A file of host memory, as another process of the same host opens it.

    Attributes:
        nbytes: size of the file.
        name: random name of the file, which no other file has.
        process: id of the process that has the file open.
        descriptor: number of the open file in that process.
    """

    nbytes: int
    name: str
    process: int
    descriptor: int


class CannotPin(RuntimeError):
    """The reason why CUDA refuses to pin host memory."""


class HostFile:
    """A new file of host memory, pinned if `device` is a GPU.

    The file stays open until this object dies. Tensors in it stay valid after that.

    Attributes:
        buffer: all bytes of the file, from which tensors on the host are made.
        address: of the first byte.
        nbytes: size of the file.
        view: the same bytes as a flat uint8 tensor on `device`.

    Raises:
        OSError: there is not enough memory.
        CannotPin: see `on_device`.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.name = PREFIX + secrets.token_hex(8)
        self._descriptor = os.memfd_create(self.name)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        # Without this a lack of memory would end the process at its first write.
        os.posix_fallocate(self._descriptor, 0, nbytes)
        self.buffer = mmap.mmap(self._descriptor, nbytes)
        memory = torch.frombuffer(self.buffer, dtype=torch.uint8)
        self.address, self.nbytes = memory.data_ptr(), nbytes
        self.view = on_device(memory, device)

    @property
    def handle(self) -> HostHandle:
        """The handle for engines on this host."""
        return HostHandle(
            nbytes=self.nbytes,
            name=self.name,
            process=os.getpid(),
            descriptor=self._descriptor,
        )


def map_file(handle: HostHandle, device: torch.device) -> torch.Tensor:
    """Map another process's file: flat uint8 on `device`, which reads the memory of the host.

    Raises:
        OSError: this process may not open the file, or its process is dead.
        ValueError: the file was closed.
        CannotPin: see `on_device`.
    """
    path = f"/proc/{handle.process}/fd/{handle.descriptor}"
    descriptor = os.open(path, os.O_RDWR)
    try:
        # The process may have closed the file, and the number may be another file's.
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
        if str(target).split(" ")[0] != f"/memfd:{handle.name}":
            raise ValueError(f"{path} is {target}, and no longer {handle.name}")
        if (nbytes := os.fstat(descriptor).st_size) != handle.nbytes:
            raise ValueError(f"{handle.name} has {nbytes} bytes, expected {handle.nbytes}")
        buffer = mmap.mmap(descriptor, handle.nbytes)
        return on_device(torch.frombuffer(buffer, dtype=torch.uint8), device)
    finally:
        os.close(descriptor)


def on_device(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pin host memory and return it as a tensor on a GPU, or return `memory` for a CPU.

    The memory stays pinned while the returned tensor, or a view of it, lives.

    Args:
        memory: flat uint8 that begins at a page.

    Raises:
        CannotPin: CUDA cannot pin the memory, as with a limit of locked memory.
    """
    if device.type != "cuda":
        return memory
    with torch.cuda.device(device):
        return torch.as_tensor(_Pinned(memory), device=device)


class _Pinned:
    """Pinned host memory, described as CUDA's array interface wants it. Unpinned with this object.

    Args:
        memory: flat uint8. The current device becomes the device of its tensors.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        address, nbytes = memory.data_ptr(), memory.numel()
        error = torch.cuda.cudart().cudaHostRegister(address, nbytes, PORTABLE_AND_MAPPED)
        if int(error):
            _drop_last_error()
            raise CannotPin(f"CUDA cannot pin {nbytes} bytes of host memory (error {int(error)})")
        device = torch.cuda.current_device()
        weakref.finalize(self, _unpin, memory, device).atexit = False
        if _gpu_address(address) != address:
            raise CannotPin("the GPU has other addresses for pinned host memory than the host")
        self.__cuda_array_interface__ = {
            "version": 2,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, False),
            "strides": None,
        }


def _unpin(memory: torch.Tensor, device: int) -> None:
    # An aborted sync may still read, and would end all of CUDA in this process.
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _gpu_address(address: int) -> int:
    """Return the address at which the current GPU reads pinned memory, or 0 if it cannot."""
    # torch has no function for this. The addresses are equal on all of today's Linux servers.
    pointer = ctypes.c_uint64(0)
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemHostGetDevicePointer_v2(ctypes.byref(pointer), ctypes.c_void_p(address), 0)
    return pointer.value


def _drop_last_error() -> None:
    """Make CUDA drop the error of a failed call."""
    # Otherwise the next launch of a kernel raises it.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
