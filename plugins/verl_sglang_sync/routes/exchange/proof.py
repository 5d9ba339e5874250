"""Compares what is sent of the ranks' shards with what the full export gives, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from sglang_loader.common.copies import gather_reads
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.arrangement import Arrangement
from verl_sglang_sync.collective import result_or_reason
from verl_sglang_sync.routes.exchange.all_to_all import AllToAll
from verl_sglang_sync.sources.bucket_stream import Batch, Bucket


def first_problem(
    buckets: Sequence[Bucket],
    batches: Iterator[Batch],
    compare: Callable[[int, Sequence[torch.Tensor] | None], str | None],
) -> str | None:
    """Go through the full export, and compare every bucket with it; collective.

    Args:
        batches: the export, which is gone through to its end: the other ranks need it.
        compare: given a bucket's number and its exported tensors: what differs. None: they have not
            come, but the other ranks may wait for this one's shards.

    Returns:
        What differs first on this rank, or what went wrong; None if nothing.
    """
    problem: str | None = None
    for index, bucket in enumerate(buckets):
        batch, reason = result_or_reason(lambda: next(batches, None))
        if batch is None or batch.bucket.digest != bucket.digest:
            batch, reason = None, reason or f"bucket {index} is not what it was"
        tensors = None if batch is None else batch.tensors
        del batch
        differs, failed = result_or_reason(partial(compare, index, tensors))
        problem = problem or reason or differs or failed
    more, reason = result_or_reason(lambda: len(list(batches)))
    return problem or reason or ("the export has more buckets than it had" if more else None)


def exchanged_difference(
    exchange: AllToAll,
    layout: BucketLayout,
    arrangement: Arrangement,
    device: torch.device,
    index: int,
    tensors: Sequence[torch.Tensor] | None,
) -> str | None:
    """Exchange one bucket, which has begun; what differs from its exported tensors, if they came.

    Args:
        arrangement: what this rank's engine reads of it.
    """
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
        failed = _first_difference(expected, found, arrangement, layout)
    return reason or failed


def gather_arranged(
    tensors: Sequence[torch.Tensor], arrangement: Arrangement, device: torch.device
) -> torch.Tensor:
    """The arranged buffer of full tensors; deliberately not by the code that is checked."""
    with torch.no_grad():
        return gather_reads(
            arrangement, lambda i: tensors[i].contiguous().reshape(-1).view(torch.uint8), device
        )


def _first_difference(
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
