"""Compilation of the kernels that a first sync runs, before the sync."""

from __future__ import annotations

import torch

from sglang_loader.common import digest
from sglang_loader.common.copies import kernel


def compile_kernels(device: torch.device) -> None:
    """Compile the kernels for a GPU, or load them from Triton's cache. No-op for a CPU.

    On a machine that has compiled none before, this takes seconds.
    """
    kernel.is_available(device)
    digest.is_available(device)
