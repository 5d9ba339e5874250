"""Limits on Python's garbage collector: no scan of the whole process during a sync."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 2**31 - 1


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Collect only young objects in the body, so that cycles still free their tensors.

    Thresholds that are set in the body stay.
    """
    # A first sync makes a million small objects that stay. For these, Python would scan all objects
    # of the process, more than once: half a second each time in a trainer, two in an engine.
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        # Bodies may overlap. The first to begin restores: the later ones have found `NEVER`.
        young, middle, current = gc.get_threshold()
        gc.set_threshold(young, middle, full if current == NEVER else current)
