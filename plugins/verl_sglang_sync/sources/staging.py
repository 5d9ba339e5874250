"""The staging buffer: one bucket's bytes, contiguous, in memory the engine's process can map."""

from __future__ import annotations

import torch


class StagingBuffer:
    """A flat uint8 buffer that grows to the largest bucket it has held.

    Allocated by torch's ordinary allocator, never inside a torch_memory_saver region. On a GPU it
    must not lie in an expandable segment (its IPC handle could not be exported): verl switches
    those off around a sync.

    Args:
        device: where the engine of this rank runs; on a CPU the buffer is shared memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held at present."""
        return self._buffer.numel()

    def reserve(self, nbytes: int) -> None:
        """Make the buffer at least `nbytes` long; the old content is lost when it grows."""
        if nbytes <= self._buffer.numel():
            return
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self.device)  # free before growing
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._buffer = buffer.share_memory_() if self.device.type == "cpu" else buffer

    def first(self, nbytes: int) -> torch.Tensor:
        """The first `nbytes` bytes: uint8 of shape `[nbytes]`, a view of the buffer."""
        return self._buffer[:nbytes]

    def synchronize(self) -> None:
        """Wait for what was copied into the buffer on the current stream."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).current_stream(self.device).synchronize()
