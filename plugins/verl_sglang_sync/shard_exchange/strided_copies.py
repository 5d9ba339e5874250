"""Many strided reads into one buffer, over and over, wherever the memory is this time.

The reads of a bucket stay the same from sync to sync, while staging buffers come and go:

    copies = StridedCopies(plan.own)
    copies.run(shards, buffer)          # asynchronous on a GPU, on the current stream

On a GPU one launch of our kernel makes all copies of 64-bit words; a new address costs one upload.
Elsewhere, and for what is no whole word, torch copies views.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from sglang_loader.load_plan.arrangement import Read
from sglang_loader.load_plan.batched_copy import (
    TILE_WORDS,
    WORD,
    is_available,
    launch,
    number_tiles,
)

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_Views = list[tuple[list[torch.Tensor], list[torch.Tensor]]]


class StridedCopies:
    """Copies reads of several memories into one; `Read.tensor` numbers the memory.

    Args:
        reads: no two share a byte of the target.
    """

    def __init__(self, reads: Sequence[Read]) -> None:
        self._reads = [read for read in reads if read.nbytes]
        self._numbers = sorted({read.tensor for read in self._reads})
        self._addresses: tuple[int, ...] | None = None
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None
        self._views: _Views = []

    def run(self, sources: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """Copy all of them.

        Args:
            sources: flat uint8 by number, on one device; alive until the copies are done.
            target: flat uint8, on the same device.
        """
        addresses = (target.data_ptr(), *(sources[i].data_ptr() for i in self._numbers))
        if addresses != self._addresses:
            self._bind(sources, target, addresses)
            self._addresses = addresses
        if self._tables is not None:
            launch(*self._tables)
        with torch.no_grad():
            for targets, origins in self._views:
                torch._foreach_copy_(targets, origins)

    def release(self) -> None:
        """Let go of the memory; its addresses may be kept where nothing else is."""
        if self._views:
            self._views, self._tables, self._addresses = [], None, None

    def _bind(
        self, sources: Sequence[torch.Tensor], target: torch.Tensor, addresses: tuple[int, ...]
    ) -> None:
        self._tables, remaining = None, self._reads
        if is_available(target.device) and all(at % WORD.itemsize == 0 for at in addresses):
            bases = np.zeros(max(self._numbers, default=0) + 1, dtype=np.int64)
            bases[self._numbers] = addresses[1:]
            tables = (self._rows.tiles, self._rows.entries(bases, addresses[0]))
            self._tables = tuple(  # type: ignore[assignment]
                torch.from_numpy(table).pin_memory().to(target.device, non_blocking=True)
                for table in tables
            )
            remaining = self._rows.remaining
        self._views = _views(remaining, sources, target)

    @cached_property
    def _rows(self) -> RowTable:
        return RowTable.of(self._reads)


@dataclass(frozen=True)
class RowTable:
    """Reads of whole words as the kernel's entries, without addresses.

    Attributes:
        source: number of the memory, by entry.
        rows: the fields of `batched_copy.Rows`, by entry, counted from the memories' first bytes.
        tiles: of all entries.
        remaining: the other reads.
    """

    source: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    tiles: npt.NDArray[np.int32]
    remaining: list[Read]

    @classmethod
    def of(cls, reads: Sequence[Read]) -> RowTable:
        """Describe `reads`."""
        size = WORD.itemsize
        numbers, entries, remaining = [], [], []
        for read in reads:
            if math.gcd(read.offset, read.start, read.run, *(s for _, s in read.dims)) % size:
                remaining.append(read)
                continue
            *outer, (rows, stride) = read.dims or ((1, 0),)
            run, step = read.run // size, rows * read.run
            starts = itertools.product(*(range(0, n * s, s) if s else [0] * n for n, s in outer))
            for i, steps in enumerate(starts):
                numbers.append(read.tensor)
                source, target = read.offset + sum(steps), read.start + i * step
                entries.append((source, target, stride // size, run, run, rows))
        table = np.array(entries, dtype=np.int64).reshape(-1, 6)
        words, rows_ = table[:, 4], table[:, 5]
        near = TILE_WORDS // np.minimum(words, TILE_WORDS)
        counts = np.where(words >= TILE_WORDS, rows_ * -(-words // TILE_WORDS), -(-rows_ // near))
        source_numbers = np.array(numbers, dtype=np.int64)
        return cls(source_numbers, table, number_tiles(counts), remaining)

    def entries(self, bases: npt.NDArray[np.int64], target: int) -> npt.NDArray[np.int64]:
        """The entries for memories that begin at these addresses."""
        placed = self.rows.copy()
        placed[:, 0] += bases[self.source]
        placed[:, 1] += target
        return placed


def _views(reads: Sequence[Read], sources: Sequence[torch.Tensor], target: torch.Tensor) -> _Views:
    """Both sides of each read as views of the widest word that fits, by that word."""
    grouped: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for read in reads:
        memory = sources[read.tensor]
        strides = [stride for _, stride in read.dims]
        fits = math.gcd(
            8, read.run, *strides, memory.data_ptr() + read.offset, target.data_ptr() + read.start
        )
        aligned = math.gcd(
            fits, _storage_start(memory) + read.offset, _storage_start(target) + read.start
        )
        shape = (*(count for count, _ in read.dims), read.run // aligned)
        targets, origins = grouped.setdefault(_WORDS[aligned], ([], []))
        origins.append(_strided(memory, _WORDS[aligned], read.offset, shape, strides))
        dense = [math.prod(shape[i + 1 :]) * aligned for i in range(len(strides))]
        targets.append(_strided(target, _WORDS[aligned], read.start, shape, dense))
    return list(grouped.values())


def _storage_start(memory: torch.Tensor) -> int:
    return int(memory.storage_offset())


def _strided(
    base: torch.Tensor, dtype: torch.dtype, start: int, shape: tuple[int, ...], strides: list[int]
) -> torch.Tensor:
    """A view of flat bytes; `start` and `strides` (all but the innermost) in bytes."""
    size = dtype.itemsize
    view = torch.empty(0, dtype=dtype, device=base.device)
    steps = (*(stride // size for stride in strides), 1)
    return view.set_(base.untyped_storage(), (_storage_start(base) + start) // size, shape, steps)
