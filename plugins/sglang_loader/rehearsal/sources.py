"""Tensors without memory: stand-ins for what a trainer would send, for a load that copies nothing.

They are views of one private mapping that nobody writes to, so that the kernel never gives it a
page: 60 GB of them take address space alone. Each has real strides and a place of its own, which
tells from any view of it which tensor it belongs to and which part of that it is. They live on the
CPU, as the tensors do that SGLang reads from a checkpoint's files.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterable

import torch

from sglang_loader.common.layout import BucketLayout, BucketTensor

_MAP_NORESERVE = 0x4000  # Linux; Python has a name for it from 3.13 on
_ALIGNMENT_BYTES = 64

Spec = tuple[str, torch.dtype, tuple[int, ...]]
"""(name, dtype, shape)."""


class Sources:
    """The stand-ins of a list of tensors; all bytes are zero.

    Args:
        specs: what to stand in for.

    Raises:
        OSError: the system gives no address space.
    """

    def __init__(self, specs: Iterable[Spec]) -> None:
        layout = BucketLayout.pack(
            ((name, shape, dtype) for name, dtype, shape in specs), _ALIGNMENT_BYTES
        )
        self.tensors: tuple[BucketTensor, ...] = layout.tensors
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        memory = mmap.mmap(-1, max(layout.nbytes, mmap.PAGESIZE), flags=flags)
        self._flat = torch.frombuffer(memory, dtype=torch.uint8)
        self._start = self._flat.data_ptr()
        self._stop = self._start + len(memory)
        self._offsets = [tensor.offset for tensor in self.tensors]
        self.views: list[tuple[str, torch.Tensor]] = layout.views(self._flat)

    def find(self, data_ptr: int) -> int | None:
        """Which source's memory holds an address; None for other memory."""
        if not self._start <= data_ptr < self._stop:
            return None
        return bisect_right(self._offsets, data_ptr - self._start) - 1

    def address_of(self, index: int) -> int:
        """Where a source begins."""
        return self._start + self._offsets[index]
