"""A host copy of address ranges of one device.

Small copies live in pinned memory. Large ones go through small pinned buffers, several at once,
into pageable memory: pinning the whole copy would take longer than copying it, and would stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from sglang_loader.common.regions.intervals import Interval, num_bytes
from sglang_loader.host_backup.allocations import bytes_at

PINNED_LIMIT_BYTES = 32 << 20
CHUNK_BYTES = 4 << 20
NUM_WORKERS = 4


@dataclass(frozen=True, slots=True)
class _Piece:
    """Device memory [start, stop), kept at `offset` of the host copy."""

    start: int
    stop: int
    offset: int


class SavedBytes:
    """The bytes that sorted, disjoint address ranges held when this was made; `restore` writes them
    back. The device's pending work must be finished.

    Raises:
        RuntimeError: the host has too little memory.
    """

    def __init__(self, device: torch.device, ranges: Sequence[Interval]) -> None:
        self.device = device
        self.ranges = tuple(ranges)
        self.nbytes = num_bytes(ranges)
        pinned = device.type == "cuda" and self.nbytes <= PINNED_LIMIT_BYTES
        with torch.inference_mode(False):
            self._host = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._copy(to_host=True)

    def restore(self) -> None:
        """Write the bytes back to where they came from; returns when they are there."""
        self._copy(to_host=False)

    def _copy(self, *, to_host: bool) -> None:
        pieces = list(_pieces(self.ranges))
        if self.device.type == "cpu" or self._host.is_pinned():
            for piece in pieces:
                self._copy_piece(piece, to_host=to_host)
            synchronize(self.device)
            return
        with ThreadPoolExecutor(NUM_WORKERS) as pool:
            shares = [
                pool.submit(self._copy_share, pieces[i::NUM_WORKERS], to_host)
                for i in range(NUM_WORKERS)
            ]
            for share in shares:
                share.result()

    def _copy_piece(self, piece: _Piece, *, to_host: bool) -> None:
        host = self._host[piece.offset : piece.offset + piece.stop - piece.start]
        memory = bytes_at(self.device, piece.start, piece.stop)
        target, source = (host, memory) if to_host else (memory, host)
        target.copy_(source, non_blocking=True)

    def _copy_share(self, pieces: Sequence[_Piece], to_host: bool) -> None:
        """One worker's pieces, through a pinned buffer and on a stream of its own."""
        stream = torch.cuda.Stream(self.device)
        bounce = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            for piece in pieces:
                count = piece.stop - piece.start
                host = self._host[piece.offset : piece.offset + count]
                memory = bytes_at(self.device, piece.start, piece.stop)
                if to_host:
                    bounce[:count].copy_(memory, non_blocking=True)
                    stream.synchronize()
                    host.copy_(bounce[:count])
                else:
                    bounce[:count].copy_(host)
                    memory.copy_(bounce[:count], non_blocking=True)
                    stream.synchronize()


def synchronize(device: torch.device) -> None:
    """Wait for everything that runs on `device`; nothing to do on a CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _pieces(ranges: Sequence[Interval]) -> Iterator[_Piece]:
    offset = 0
    for start, stop in ranges:
        for at in range(start, stop, CHUNK_BYTES):
            end = min(at + CHUNK_BYTES, stop)
            yield _Piece(at, end, offset)
            offset += end - at
