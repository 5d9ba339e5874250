"""Memory in use on whole GPUs, all processes together, as the driver counts it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

INTERVAL_S = 0.005


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
