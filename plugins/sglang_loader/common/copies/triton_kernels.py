"""Triton, and whether our kernels work on a device.

Where one does not, torch does the same, slower. That is logged where it happens; and since SGLang's
processes log errors alone under verl, an engine's first rank tells its `fallbacks` in the reply to
a sync, which the trainer logs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = tl = None

__all__ = ["fallbacks", "kernel_works", "tl", "triton"]

logger = logging.getLogger(__name__)

fallbacks: list[str] = []
"""What torch does in place of a kernel in this process, and why."""


def kernel_works(work: str, device: torch.device, attempt: Callable[[], bool]) -> bool:
    """True if a kernel compiles and works on `device`. The caller keeps the answer.

    Args:
        work: what the kernel does, as in "copies weights".
        attempt: runs it; returns whether the result is right.
    """
    if device.type != "cuda":
        return False
    try:
        why = "Triton is not installed" if triton is None else "" if attempt() else "a wrong result"
    except Exception as error:
        why = repr(error)
    if why:
        fallbacks.append(f"torch {work} on {device}, slower: the Triton kernel fails: {why}")
        logger.warning("%s", fallbacks[-1])
    return not why
