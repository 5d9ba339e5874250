"""Compares what shards were exchanged into with what the full export gives, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_loader.load_plan.arrangement import Arrangement, Read
from sglang_loader.load_plan.layout import BucketLayout


def gather_arranged(
    tensors: Sequence[torch.Tensor], arrangement: Arrangement, device: torch.device
) -> torch.Tensor:
    """The arranged buffer of full tensors; zero where nothing is read.

    Deliberately not the code that it checks: one plain copy for each read.
    """
    buffer = torch.zeros(arrangement.nbytes, dtype=torch.uint8, device=device)
    with torch.no_grad():
        for read in arrangement.reads:
            if read.nbytes:
                flat = tensors[read.tensor].contiguous().reshape(-1).view(torch.uint8)
                target = buffer[read.start : read.start + read.nbytes]
                target.copy_(_picked(flat, read).reshape(-1))
    return buffer


def first_difference(
    expected: torch.Tensor, found: torch.Tensor, arrangement: Arrangement, layout: BucketLayout
) -> str | None:
    """The first tensor of which bytes differ, in words; None if none does."""
    if torch.equal(expected, found):
        return None
    at = int((expected != found).nonzero()[0])
    for read in arrangement.reads:
        if read.start <= at < read.start + read.nbytes:
            return f"{layout.tensors[read.tensor].name} differs from the full export"
    return f"byte {at}, which nobody reads, was written"


def _picked(flat: torch.Tensor, read: Read) -> torch.Tensor:
    shape = (*(count for count, _ in read.dims), read.run)
    strides = (*(stride for _, stride in read.dims), 1)
    return flat.as_strided(shape, strides, int(flat.storage_offset()) + read.offset)
