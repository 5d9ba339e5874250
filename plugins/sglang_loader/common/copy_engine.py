"""Large copies by a GPU's copy engines, which read another GPU's memory faster than a kernel does.

Between two H200s that read each other's memory at once, a kernel gets 338 GB/s and a copy engine
374 GB/s (`benchmarks/peer_reads.py`), and it reads the peer while the kernel reads its own memory.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from sglang_loader.common.shared_memory import gpu_uuid

logger = logging.getLogger(__name__)

MIN_RUN_WORDS = 32 << 10
"""256 KiB; of shorter rows a copy engine copies fewer bytes a second."""
MAX_STRIDE_WORDS = 1 << 27
"""1 GiB; CUDA allows less than 2 GiB for a row, and from one to the next."""
_WORD_BYTES = 8
_ANY_DIRECTION = 4  # cudaMemcpyDefault


@dataclass(frozen=True, slots=True)
class Rows:
    """`rows` rows of `run` consecutive 64-bit words; addresses in bytes, strides in words."""

    src: int
    dst: int
    src_stride: int
    dst_stride: int
    run: int
    rows: int


def can_copy(rows: Rows) -> bool:
    """True if these rows are worth a copy of their own, and CUDA can make it."""
    strides = (rows.src_stride, rows.dst_stride)
    return MIN_RUN_WORDS <= rows.run < MAX_STRIDE_WORDS and (
        rows.rows == 1 or all(rows.run <= stride < MAX_STRIDE_WORDS for stride in strides)
    )


def in_turns(rows: Sequence[tuple[str, Rows]], own: str) -> list[Rows]:
    """All rows of one GPU after the other's, beginning behind `own`: where all GPUs read from all
    others, no two of them read from the same one at a time.
    """
    return [each for _, each in sorted(rows, key=lambda row: (row[0] < own, row[0]))]


class EngineCopies:
    """Copies by a device's copy engines, on a stream of their own: of rows, each of which
    `can_copy`, with the UUID of the GPU where it lies.
    """

    def __init__(self, rows: Sequence[tuple[str, Rows]], device: torch.device) -> None:
        ordered = in_turns(rows, gpu_uuid(device.index)) if rows else ()
        self._copies = [_arguments(each) for each in ordered]
        self._stream = _stream(device) if rows else None

    def start(self) -> None:
        """Begin, after what the current stream has been given; asynchronous.

        Raises:
            RuntimeError: CUDA refuses a copy.
        """
        if self._stream is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        copy, stream = _runtime().cudaMemcpy2DAsync, ctypes.c_void_p(self._stream.cuda_stream)
        with torch.cuda.device(self._stream.device):
            for arguments in self._copies:
                if code := copy(*arguments, _ANY_DIRECTION, stream):
                    _runtime().cudaGetLastError()  # or torch raises it after its next launch
                    raise RuntimeError(f"cudaMemcpy2DAsync failed with CUDA's error {code}")

    def join(self) -> None:
        """What the current stream is given from now on comes after the copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def _arguments(rows: Rows) -> tuple[Any, ...]:
    """Of `cudaMemcpy2DAsync`, as far as the rows give them."""
    width = rows.run * _WORD_BYTES
    dst_pitch, src_pitch = (
        width if rows.rows == 1 else stride * _WORD_BYTES
        for stride in (rows.dst_stride, rows.src_stride)
    )
    sizes = (ctypes.c_size_t(src_pitch), ctypes.c_size_t(width), ctypes.c_size_t(rows.rows))
    target, source = ctypes.c_void_p(rows.dst), ctypes.c_void_p(rows.src)
    return target, ctypes.c_size_t(dst_pitch), source, *sizes


@cache
def is_available(device: torch.device) -> bool:
    """True if copies by the copy engines arrive on this CUDA device; tried once."""
    try:
        source = torch.arange(24, device=device).view(3, 8)[:, :5]
        target = torch.zeros(3, 7, dtype=torch.int64, device=device)[:, :5]
        rows = Rows(source.data_ptr(), target.data_ptr(), 8, 7, 5, 3)
        copies = EngineCopies([("", rows)], device)
        copies.start()
        copies.join()
        return torch.equal(source, target)
    except Exception as error:
        logger.warning("the kernel reads other GPUs' memory, not a copy engine: %r", error)
        return False


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _runtime() -> ctypes.CDLL:
    """CUDA's runtime, of the version that torch has loaded."""
    assert torch.version.cuda is not None
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
