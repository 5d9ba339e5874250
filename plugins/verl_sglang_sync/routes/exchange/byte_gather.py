"""Gathers bytes out of tensors into one buffer: packs what a rank sends, unpacks what has come.

    gather = ByteGather(reads, device)            # tables, once per bucket
    gather.run(tensors, buffer)                   # every sync; asynchronous on a GPU

On a GPU one launch of the kernel of `common.copy_kernel` gathers all reads of whole words. Its
table of rows stays on the device; from sync to sync only the addresses of the tensors and of the
buffer change, and they are one small upload. What it gathers first is compared with what torch
gathers. After a difference, and for all else (other devices, reads of odd bytes), torch copies.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_loader.common.copies import copy_views
from sglang_loader.common.copy_kernel import (
    WORD,
    Rows,
    is_available,
    launch,
    rows_between,
    tables_of,
)
from sglang_loader.common.regions.arrangement import Read, end_of

logger = logging.getLogger(__name__)

WORD_BYTES = WORD.itemsize

Words = npt.NDArray[np.int64]


class ByteGather:
    """Gathers the same reads, sync after sync; by the kernel where it is available."""

    def __init__(
        self, reads: Sequence[Read], device: torch.device, *, use_kernel: bool | None = None
    ) -> None:
        self._reads = reads
        self._nbytes = end_of(reads)
        self._device = device
        self._members = sorted({read.tensor for read in reads})
        kernel = is_available(device) if use_kernel is None else use_kernel
        self._in_words, self._others = _divided(reads) if kernel else ([], [])
        self._gather: _Gather | None = None
        self._is_proven = False
        if self._in_words:
            self._gather = _Gather(GatherTable.of(self._in_words, self._members), device)

    def run(self, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """Gather, on the current stream.

        Args:
            tensors: of the bucket, in its order, of any device and stride.
            buffer: flat uint8 from its storage's first byte on, as long as the reads reach; else
                `ValueError`.
        """
        if buffer.numel() < self._nbytes or buffer.storage_offset():
            raise ValueError(
                f"the buffer has {buffer.numel()} bytes from byte {buffer.storage_offset()} on, "
                f"the reads need {self._nbytes} from byte 0"
            )
        with torch.no_grad():
            dense = {i: _dense(tensors[i], buffer.device) for i in self._members}
            is_gathered = self._gather is not None and self._by_kernel(dense, buffer)
            left = self._others if is_gathered else self._reads
            _copy_by_torch(left, dense, buffer)

    def _by_kernel(self, dense: dict[int, torch.Tensor], buffer: torch.Tensor) -> bool:
        """Gather the reads of whole words; False if that is left to torch."""
        assert self._gather is not None
        places = [buffer.data_ptr(), *(tensor.data_ptr() for tensor in dense.values())]
        addresses = np.array(places, dtype=np.int64)
        if not np.all(addresses % WORD_BYTES == 0):
            return False
        self._gather.run(addresses)
        if not self._is_proven:
            found = buffer[: self._nbytes]
            expected = found.clone()
            _copy_by_torch(self._in_words, dense, expected)
            self._is_proven = torch.equal(found, expected)
            if not self._is_proven:
                logger.error("the packing kernel gathered other bytes than torch, which packs now")
                self._gather = None
                return False
        return True


@dataclass(frozen=True)
class GatherTable:
    """What the kernel needs but the addresses of a sync; pure numbers.

    Attributes:
        rows: [n, 6], the fields of `Rows`; the source counts from the tensor's first byte, the
            target from the buffer's.
        places: [n, 2], the position in `(buffer, *tensors that are read)` of what each of the two
            counts from.
        tiles: [m, 2], see `tile_table`.
    """

    rows: Words
    places: Words
    tiles: npt.NDArray[np.int32]

    @classmethod
    def of(cls, reads: Sequence[Read], members: Sequence[int]) -> GatherTable:
        """Of reads of whole words; the addresses of `members`, in that order, will be given."""
        place = {tensor: i for i, tensor in enumerate(members, start=1)}
        entries = [(rows, place[read.tensor]) for read in reads for rows in _rows(read)]
        places = np.array([(member, 0) for _, member in entries], dtype=np.int64).reshape(-1, 2)
        rows, tiles = tables_of([rows for rows, _ in entries])
        return cls(rows, places, tiles)


class _Gather:
    """A table on the device, and the addresses that it was last run with."""

    def __init__(self, table: GatherTable, device: torch.device) -> None:
        self._device = device
        self._entries = torch.from_numpy(table.rows).to(device)
        self._within = self._entries[:, :2].clone()
        self._places = torch.from_numpy(table.places).to(device)
        self._tiles = torch.from_numpy(table.tiles).to(device)
        self._addresses: Words | None = None

    def run(self, addresses: Words) -> None:
        """Launch, for the addresses of the buffer and of the tensors."""
        if self._addresses is None or not np.array_equal(addresses, self._addresses):
            # An upload from pageable memory has read it when it returns.
            bases = torch.from_numpy(addresses).to(self._device)
            self._entries[:, :2] = self._within + bases[self._places]
            self._addresses = addresses
        launch(self._tiles, self._entries)


def _divided(reads: Sequence[Read]) -> tuple[list[Read], list[Read]]:
    """(reads of whole words, the others)."""
    in_words: list[Read] = []
    others: list[Read] = []
    for read in reads:
        numbers = (read.start, read.offset, read.run, *(step for _, step in read.dims))
        whole = all(number % WORD_BYTES == 0 for number in numbers)
        (in_words if whole else others).append(read)
    return in_words, others


def _rows(read: Read) -> list[Rows]:
    """The read as the kernel's rows, which count from the first bytes of tensor and buffer."""
    shape = [*(count for count, _ in read.dims), read.run // WORD_BYTES]
    strides = [*(stride // WORD_BYTES for _, stride in read.dims), 1]
    steps = [*(step // WORD_BYTES for step in read.steps), 1]
    return list(rows_between(read.offset, read.start, shape, strides, steps))


def _dense(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.is_contiguous() and tensor.device == device:
        return tensor
    return tensor.to(device).contiguous()


def _copy_by_torch(
    reads: Sequence[Read], dense: dict[int, torch.Tensor], buffer: torch.Tensor
) -> None:
    """Gather by torch's copies, words as wide as each read allows; grouped by their width."""
    groups: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for read in reads:
        raw = dense[read.tensor].view(-1).view(torch.uint8)
        target, source = copy_views(read.as_copy(), raw, buffer)
        targets, sources = groups.setdefault(target.dtype, ([], []))
        targets.append(target)
        sources.append(source)
    for targets, sources in groups.values():
        torch._foreach_copy_(targets, sources, non_blocking=True)
