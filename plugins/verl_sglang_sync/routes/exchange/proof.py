"""Compares what shards are exchanged into with what the full export gives, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from sglang_loader.common.copies import gather_reads
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.arrangement import Arrangement
from verl_sglang_sync.collective import result_or_reason
from verl_sglang_sync.routes.exchange.all_to_all import AllToAll
from verl_sglang_sync.sources.bucket_stream import Batch, Bucket


def compare_with_export(
    exchange: AllToAll,
    buckets: Sequence[Bucket],
    arrangements: Sequence[Arrangement],
    batches: Iterator[Batch],
    device: torch.device,
) -> str | None:
    """Exchange every bucket, and compare it with the full export's; collective.

    Args:
        exchange: that has begun.
        arrangements: by bucket, what this rank's engine reads.

    Returns:
        What differs first on this rank, or what went wrong; None if nothing.
    """
    problem: str | None = None
    for index, (bucket, arrangement) in enumerate(zip(buckets, arrangements, strict=True)):
        batch, reason = result_or_reason(lambda: next(batches, None))
        if batch is None or batch.bucket.digest != bucket.digest:
            batch, reason = None, reason or f"bucket {index} is not what it was"
        tensors = None if batch is None else batch.tensors
        del batch
        found = _compare(exchange, index, arrangement, bucket.layout, tensors, device)
        problem = problem or reason or found
    more, reason = result_or_reason(lambda: len(list(batches)))  # all ranks go to the end
    return problem or reason or ("the export has more buckets than it had" if more else None)


def _compare(
    exchange: AllToAll,
    index: int,
    arrangement: Arrangement,
    layout: BucketLayout,
    tensors: Sequence[torch.Tensor] | None,
    device: torch.device,
) -> str | None:
    """Exchange one bucket; what differs from the full export's tensors, if it came."""
    buffers, reason = None, None
    if tensors is not None:
        given = tensors
        buffers, reason = result_or_reason(
            lambda: (
                gather_arranged(given, arrangement, device),
                torch.zeros(arrangement.nbytes, dtype=torch.uint8, device=device),
            )
        )
    expected, found = buffers or (None, None)
    # Also after a failure: the other ranks wait for this one's shards.
    _, failed = result_or_reason(lambda: exchange.fill(index, found))
    if failed is None and expected is not None and found is not None:
        differs, failed = result_or_reason(
            lambda: first_difference(expected, found, arrangement, layout)
        )
        failed = failed or differs
    return reason or failed


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
