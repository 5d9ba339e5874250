"""Python's garbage collector, kept from going through a whole process during a sync."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 2**31 - 1


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Only young objects are collected in the body, so that cycles free their tensors there, too.

    A first sync makes a million small objects that stay. Python would go through everything in the
    process for them, more than once: half a second each time in a trainer, two in an engine.
    Thresholds that are set meanwhile stay. Bodies may overlap: the first to begin restores.
    """
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        young, middle, now = gc.get_threshold()
        gc.set_threshold(young, middle, full if now == NEVER else now)
