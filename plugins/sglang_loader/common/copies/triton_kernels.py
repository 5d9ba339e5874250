"""Triton, and a check whether our kernels work on a device.

If a kernel does not work, torch does the same, slower. The process logs that. Under verl SGLang's
processes log errors alone. So an engine's first rank reports its `fallbacks` in the reply to a
sync, and the trainer logs them.
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
"""The work that torch does in place of a kernel in this process, each with the reason."""


def kernel_works(work: str, device: torch.device, attempt: Callable[[], bool]) -> bool:
    """Return True if a kernel compiles and works on `device`. The caller keeps the answer.

    Args:
        work: what the kernel does, as in "copies weights".
        attempt: runs the kernel, and returns True if the result is right.
    """
    if device.type != "cuda":
        return False
    try:
        if triton is None:
            reason = "Triton is not installed"
        else:
            reason = "" if attempt() else "a wrong result"
    except Exception as error:
        reason = repr(error)
    if reason:
        fallbacks.append(f"torch {work} on {device}, slower: the Triton kernel fails: {reason}")
        logger.warning("%s", fallbacks[-1])
    return not reason
