"""Strided bytes in torch: places of tensors, and copies without the copy kernel.

Copies run without the kernel where the kernel does not work, or is checked.
"""

from __future__ import annotations

import math

import torch

from sglang_loader.common.regions.geometry import Region, StridedCopy

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def region_of(tensor: torch.Tensor) -> Region:
    """Return the place of a tensor's elements in its storage."""
    itemsize = tensor.element_size()
    offset = int(tensor.storage_offset()) * itemsize
    return Region(offset, tuple(tensor.shape), tuple(tensor.stride()), itemsize)


def copy_views(
    copy: StridedCopy, buffer: torch.Tensor, base: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the destination and source of one copy, as tensors of the widest word that fits both.

    Args:
        buffer: flat uint8, which the copy reads.
        base: flat uint8 at the beginning of its storage, which the copy writes.

    Raises:
        ValueError: elements that are cast are not aligned to their size.
    """
    src_start, dst_start = int(buffer.storage_offset()) + copy.src, copy.dst
    counts = [count for count, _, _ in copy.dims]
    src_strides = [src for _, src, _ in copy.dims]
    dst_strides = [dst for _, _, dst in copy.dims]
    if copy.unit.cast is not None:  # torch converts element by element
        src_dtype, dst_dtype = copy.unit.cast
        assert isinstance(src_dtype, torch.dtype) and isinstance(dst_dtype, torch.dtype)
        units = copy.run
    else:
        # The widest word whose size divides all offsets, strides, lengths and addresses.
        aligned = math.gcd(
            8, src_start, dst_start, copy.run, buffer.untyped_storage().data_ptr(),
            base.data_ptr(), *src_strides, *dst_strides,
        )  # fmt: skip
        src_dtype = dst_dtype = _WORDS[aligned]
        units = copy.run // aligned
    source = _strided(buffer, src_dtype, src_start, (*counts, units), src_strides)
    return _strided(base, dst_dtype, dst_start, (*counts, units), dst_strides), source


def _strided(
    base: torch.Tensor, dtype: torch.dtype, start: int, shape: tuple[int, ...], strides: list[int]
) -> torch.Tensor:
    """View `base`'s storage. `start` and `strides` are in bytes, without the innermost stride."""
    size = dtype.itemsize
    if any(number % size for number in (start, *strides)):
        raise ValueError(
            f"elements of {dtype} at byte {start}, {strides} bytes apart: allowed are multiples of "
            f"{size} bytes"
        )
    view = torch.empty(0, dtype=dtype, device=base.device)
    steps = (*(s // size for s in strides), 1)
    return view.set_(base.untyped_storage(), start // size, shape, steps)


def synchronize(device: torch.device) -> None:
    """Wait until the current stream of `device` has run everything. A CPU needs no wait."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()


def synchronize_device(device: torch.device) -> None:
    """Wait for everything that runs on `device`. A CPU needs no wait."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
