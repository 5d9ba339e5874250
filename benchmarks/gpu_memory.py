"""Memory in use on whole GPUs, all processes together, as the driver counts it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch

PEAKS_INTERVAL_S = 0.005
SAMPLES_INTERVAL_S = 0.02


def used_bytes(gpus: Sequence[int]) -> list[int]:
    """Bytes in use on each of this process's GPUs; zeros where there is none (a CPU run)."""
    if not gpus:
        return [0, 0]
    return [torch.cuda.device_memory_used(gpu) for gpu in gpus]


class _Watch:
    """Calls `look` in a thread for as long as the body runs. A context manager."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s, self._stop = interval_s, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def look(self) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.look()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class MemoryPeaks(_Watch):
    """Highest use of each GPU, in bytes: `peaks`."""

    def __init__(self, gpus: Sequence[int]) -> None:
        super().__init__(PEAKS_INTERVAL_S)
        self._gpus, self.peaks = gpus, used_bytes(gpus)

    def look(self) -> None:
        self.peaks = list(map(max, self.peaks, used_bytes(self._gpus)))


class Sample(NamedTuple):
    """Seconds since an arbitrary start, bytes in use, what `progress` returned."""

    seconds: float
    used: int
    progress: int


class MemorySamples(_Watch):
    """Use of the first GPU over time.

    Args:
        progress: called with every sample, such as the number of steps that are done.
    """

    def __init__(self, progress: Callable[[], int]) -> None:
        super().__init__(SAMPLES_INTERVAL_S)
        self._progress = progress
        self._samples: list[Sample] = []

    def look(self) -> None:
        self._samples.append(Sample(time.monotonic(), used_bytes([0])[0], self._progress()))

    def of(self, progress: int) -> dict[str, list[float]]:
        """The samples with this progress, as columns; seconds from the first of them."""
        chosen = [sample for sample in self._samples if sample.progress == progress]
        return {
            "seconds": [round(sample.seconds - chosen[0].seconds, 3) for sample in chosen],
            "megabytes": [sample.used // 1_000_000 for sample in chosen],
        }
