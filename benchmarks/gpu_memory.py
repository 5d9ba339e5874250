"""Memory in use on whole GPUs, all processes together, as the driver counts it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

INTERVAL_S = 0.005
SAMPLE_S = 0.02


def used_bytes(gpus: Sequence[int]) -> list[int]:
    """Bytes in use on each GPU; zeros where there is none (a CPU run)."""
    if not gpus:
        return [0, 0]
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in gpus]
    return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]


@dataclass
class Watch:
    """What `watching` saw.

    Attributes:
        peaks: highest use of each GPU, in bytes.
    """

    peaks: list[int] = field(default_factory=list)


@contextmanager
def watching(gpus: Sequence[int]) -> Iterator[Watch]:
    """Sample the use of the GPUs in a thread while the body runs."""
    watch, stop = Watch(used_bytes(gpus)), threading.Event()

    def sample() -> None:
        while not stop.wait(INTERVAL_S):
            pairs = zip(watch.peaks, used_bytes(gpus), strict=True)
            watch.peaks = [max(pair) for pair in pairs]

    thread = threading.Thread(target=sample, daemon=True)
    if gpus:
        thread.start()
    try:
        yield watch
    finally:
        stop.set()
        if gpus:
            thread.join()


@dataclass(frozen=True)
class Sample:
    """Attributes: seconds since an arbitrary start, bytes in use, what `progress` returned."""

    seconds: float
    used: int
    progress: int


class MemorySamples:
    """Use of one GPU over time, sampled in the background. A context manager.

    Args:
        progress: called with every sample, such as the number of steps that are done.
        gpu: which one.
    """

    def __init__(self, progress: Callable[[], int], gpu: int = 0) -> None:
        self._progress = progress
        self._gpu = gpu
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._samples: list[Sample] = []

    def of(self, progress: int) -> dict[str, list[float]]:
        """The samples with this progress, as columns; seconds from the first of them."""
        chosen = [sample for sample in self._samples if sample.progress == progress]
        return {
            "seconds": [round(sample.seconds - chosen[0].seconds, 3) for sample in chosen],
            "megabytes": [sample.used // 1_000_000 for sample in chosen],
        }

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            [used] = used_bytes([self._gpu])
            self._samples.append(Sample(time.monotonic(), used, self._progress()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
