"""Python's garbage collector, kept out of work that makes no garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collections within: a model's trace, and what is made of it, is a million
    small objects without cycles. They take a third of the tracing in the engine, half a second each
    in a trainer.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
