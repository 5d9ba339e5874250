"""Maps GPU memory of another process, in each of the ways there are, and says what CUDA answers.

    handle = export_block(tensor)                 # owner; JSON, for one receiver
    mapping = WAYS["runtime"](handle, index)      # reader; `index` of a GPU of this process
    mapping.tensor; mapping.close()

`cudaIpcOpenMemHandle` maps into the context of the current GPU, which need not be the owner's.
torch makes the same call with GPU `index` current, and before it opens the owner's event, to wait
for it: the two ways of torch differ in that.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

LAZY_ENABLE_PEER_ACCESS = 1
Handle = dict[str, Any]


class CudaCallError(RuntimeError):
    """A call of CUDA's: its name, the error's name, number and text."""


class IpcHandle(ctypes.Structure):
    """`cudaIpcMemHandle_t` and `CUipcMemHandle`, which are passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class PointerAttributes(ctypes.Structure):
    """`cudaPointerAttributes`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
        ("reserved", ctypes.c_long * 16),
    )


@dataclass
class Mapping:
    """Memory of another process: flat int64, until `close`."""

    tensor: torch.Tensor
    close: Callable[[], None]


@cache
def _runtime_library() -> ctypes.CDLL:
    loaded = re.search(r"/\S*/libcudart[^/\s]*\.so[.\d]*", Path("/proc/self/maps").read_text())
    library = ctypes.CDLL(loaded[0] if loaded else "libcudart.so.13")
    library.cudaGetErrorName.restype = library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def runtime_call(function: str, *arguments: Any) -> None:
    """Call libcudart, torch's own copy of it.

    Raises:
        CudaCallError: the call failed.
    """
    library = _runtime_library()
    code = getattr(library, function)(*arguments)
    if code:
        library.cudaGetLastError()  # or torch raises it after its next launch
        name, text = library.cudaGetErrorName(code), library.cudaGetErrorString(code)
        raise CudaCallError(f"{function}: {name.decode()} ({code}): {text.decode()}")


def driver_call(function: str, *arguments: Any) -> None:
    """Call libcuda.

    Raises:
        CudaCallError: the call failed.
    """
    library = ctypes.CDLL("libcuda.so.1")
    code = getattr(library, function)(*arguments)
    if code:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(name))
        library.cuGetErrorString(code, ctypes.byref(text))
        said = [(value.value or b"?").decode() for value in (name, text)]
        raise CudaCallError(f"{function}: {said[0]} ({code}): {said[1]}")


def allocate(nbytes: int) -> int:
    """`cudaMalloc`: the address of a block of its own."""
    address = ctypes.c_void_p()
    runtime_call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(nbytes))
    assert address.value is not None
    return address.value


def export_address(address: int) -> str:
    """IPC handle of the block in which `address` lies, in hex."""
    handle = IpcHandle()
    runtime_call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
    return bytes(handle).hex()


def open_runtime(handle: str) -> int:
    """Map into the context of this process's current GPU; the address."""
    address = ctypes.c_void_p()
    ipc = IpcHandle.from_buffer_copy(bytes.fromhex(handle))
    flags = ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS)
    runtime_call("cudaIpcOpenMemHandle", ctypes.byref(address), ipc, flags)
    assert address.value is not None
    return address.value


def close_runtime(address: int) -> None:
    """Undo `open_runtime`."""
    runtime_call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))


def describe_pointer(address: int) -> dict[str, int]:
    """What the runtime and the driver know of an address (type 2 is memory of a GPU)."""
    attributes, base, size = PointerAttributes(), ctypes.c_uint64(), ctypes.c_size_t()
    pointer = ctypes.c_void_p(address)
    runtime_call("cudaPointerGetAttributes", ctypes.byref(attributes), pointer)
    where = ctypes.c_uint64(address)
    driver_call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), where)
    return {
        "type": attributes.type,
        "device": attributes.device,
        "offset": address - base.value,
        "block_bytes": size.value,
    }


def export_block(tensor: torch.Tensor) -> Handle:
    """Handles for both ways, of a tensor that is a whole storage."""
    shared = tensor.untyped_storage()._share_cuda_()
    ipc = export_address(tensor.data_ptr())
    return {
        "nbytes": tensor.nbytes,
        "ipc": ipc,
        "torch": [part.hex() if isinstance(part, bytes) else part for part in shared],
        "torch_has_the_same_handle": shared[1][-64:].hex() == ipc,
    }


def tensor_at(address: int, nbytes: int, index: int) -> torch.Tensor:
    """Memory as flat int64 of GPU `index`, whatever CUDA says of the address; owns nothing."""
    device = torch.device("cuda", index)
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.int64, device=device).set_(storage, 0, (nbytes // 8,), (1,))


def tensor_by_interface(address: int, nbytes: int) -> torch.Tensor:
    """Memory as flat int64 through `__cuda_array_interface__`; torch asks CUDA for the device."""

    interface = {"shape": (nbytes // 8,), "typestr": "<i8", "data": (address, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface))


def _by_runtime(handle: Handle, index: int) -> Mapping:
    address = open_runtime(handle["ipc"])
    tensor = tensor_at(address, handle["nbytes"], index)
    return Mapping(tensor, lambda: close_runtime(address))


def _by_driver(handle: Handle, index: int) -> Mapping:
    address = ctypes.c_uint64()
    ipc = IpcHandle.from_buffer_copy(bytes.fromhex(handle["ipc"]))
    flags = ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS)
    driver_call("cuIpcOpenMemHandle_v2", ctypes.byref(address), ipc, flags)
    tensor = tensor_at(address.value, handle["nbytes"], index)
    return Mapping(tensor, lambda: driver_call("cuIpcCloseMemHandle", address))


def _by_torch(handle: Handle, index: int, waits: bool) -> Mapping:
    _, block, nbytes, offset, counter, counter_offset, event, required = handle["torch"]
    storage = torch.UntypedStorage._new_shared_cuda(
        *(index, bytes.fromhex(block), nbytes, offset, bytes.fromhex(counter), counter_offset),
        *(bytes.fromhex(event), required and waits),
    )
    tensor = torch.empty(0, dtype=torch.int64, device=storage.device)
    return Mapping(tensor.set_(storage, 0, (nbytes // 8,), (1,)), lambda: None)


WAYS: dict[str, Callable[[Handle, int], Mapping]] = {
    "runtime": _by_runtime,
    "driver": _by_driver,
    "torch": lambda handle, index: _by_torch(handle, index, True),
    "torch, no event": lambda handle, index: _by_torch(handle, index, False),
}
