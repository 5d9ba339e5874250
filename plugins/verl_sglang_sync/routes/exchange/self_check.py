"""Compares what shards were exchanged into with what the full export gives, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_loader.common.copies import gather_reads
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.arrangement import Arrangement


def gather_arranged(
    tensors: Sequence[torch.Tensor], arrangement: Arrangement, device: torch.device
) -> torch.Tensor:
    """The arranged buffer of full tensors; deliberately not by the code that is checked."""
    with torch.no_grad():
        return gather_reads(
            arrangement, lambda i: tensors[i].contiguous().reshape(-1).view(torch.uint8), device
        )


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
