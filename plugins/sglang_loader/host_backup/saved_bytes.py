"""A host copy of address ranges of one device.

Small copies live in pinned memory. Large copies go through small pinned buffers, several at once,
into pageable memory. Pinning a whole large copy would take longer than the copy itself, and the
memory would stay pinned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from sglang_loader.common.copies.strided import synchronize_device
from sglang_loader.common.regions.intervals import Interval, num_bytes
from sglang_loader.host_backup.allocations import bytes_at

PINNED_LIMIT_BYTES = 32 << 20
CHUNK_BYTES = 4 << 20
NUM_WORKERS = 4


class SavedBytes:
    """A copy of the bytes in sorted, disjoint address ranges.

    The device's pending work must be finished before the copy is made.

    Raises:
        RuntimeError: the host has too little memory.
    """

    def __init__(self, device: torch.device, ranges: Sequence[Interval]) -> None:
        self.device = device
        self.ranges = tuple(ranges)
        self.nbytes = num_bytes(ranges)
        pinned = device.type == "cuda" and self.nbytes <= PINNED_LIMIT_BYTES
        # A tensor that is made in inference mode cannot be written outside of it.
        with torch.inference_mode(False):
            self._host = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._copy(to_host=True)

    def restore(self) -> None:
        """Write the bytes back to their addresses, and wait for the copies."""
        self._copy(to_host=False)

    def _copy(self, *, to_host: bool) -> None:
        chunks = list(self._chunks())
        if self.device.type == "cpu" or self._host.is_pinned():
            for host, memory in chunks:
                target, source = (host, memory) if to_host else (memory, host)
                target.copy_(source, non_blocking=True)
            synchronize_device(self.device)
            return
        # Each worker waits for its own stream, so that several copies overlap.
        with ThreadPoolExecutor(NUM_WORKERS) as pool:
            shares = [
                pool.submit(self._copy_share, chunks[i::NUM_WORKERS], to_host)
                for i in range(NUM_WORKERS)
            ]
            for share in shares:
                share.result()

    def _copy_share(
        self, chunks: Sequence[tuple[torch.Tensor, torch.Tensor]], to_host: bool
    ) -> None:
        """Copy one worker's chunks, through a pinned buffer and on a stream of its own."""
        stream = torch.cuda.Stream(self.device)
        bounce = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            for host, memory in chunks:
                target, source = (host, memory) if to_host else (memory, host)
                part = bounce[: len(source)]
                part.copy_(source, non_blocking=True)
                stream.synchronize()
                target.copy_(part, non_blocking=True)
                stream.synchronize()

    def _chunks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield corresponding chunks (host copy, device memory) of at most `CHUNK_BYTES`."""
        rest = self._host
        for start, stop in self.ranges:
            for at in range(start, stop, CHUNK_BYTES):
                memory = bytes_at(self.device, at, min(at + CHUNK_BYTES, stop))
                host, rest = rest[: len(memory)], rest[len(memory) :]
                yield host, memory
