"""Samples how much memory of a GPU is in use while another process works on it."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

PERIOD_MS = 20


@dataclass(frozen=True)
class Sample:
    """Attributes: seconds since an arbitrary start, megabytes in use, what `progress` returned."""

    seconds: float
    megabytes: int
    progress: int


class MemorySamples:
    """Samples GPU 0 in the background, by `nvidia-smi`. A context manager.

    Args:
        progress: called with every sample, such as the number of steps that are done.
    """

    def __init__(self, progress: Callable[[], int]) -> None:
        self._progress = progress
        self.samples: list[Sample] = []

    def of(self, progress: int) -> dict[str, list[float]]:
        """The samples with this progress, as columns; seconds from the first of them."""
        chosen = [sample for sample in self.samples if sample.progress == progress]
        return {
            "seconds": [round(sample.seconds - chosen[0].seconds, 3) for sample in chosen],
            "megabytes": [sample.megabytes for sample in chosen],
        }

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            sample = Sample(time.monotonic(), int(line), self._progress())
            self.samples.append(sample)

    def __enter__(self) -> Self:
        query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
        self._process = subprocess.Popen(
            ["nvidia-smi", *query, f"--loop-ms={PERIOD_MS}"], stdout=subprocess.PIPE, text=True
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()
