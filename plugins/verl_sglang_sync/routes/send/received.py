"""How engine ranks find buckets in what they receive, and the proof that they find the right bytes.

Each byte that is read comes from one trainer rank (`plan_reader` makes sure), and that rank
compares it: what it would send, found as the engine rank would find it, with the full export.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from verl_sglang_sync.routes.exchange.exchange_plan import Received, plan_reader, received
from verl_sglang_sync.routes.exchange.proof import first_problem, gather_arranged
from verl_sglang_sync.routes.exchange.shard_route import ShardPlan
from verl_sglang_sync.sources.bucket_stream import Batch


def plan_receives(plan: ShardPlan) -> tuple[list[list[Received]], list[list[int]]]:
    """How every engine rank finds every bucket, by bucket and engine rank, and the bytes of each
    pair of ranks, by trainer rank and engine rank. Pure.

    Raises:
        ValueError: what an engine rank reads is not in the shards, once.
    """
    num_trainers, num_readers = plan.first_reader, len(plan.known)
    found: list[list[Received]] = []
    pair_bytes = [[0] * num_readers for _ in range(num_trainers)]
    for index, bucket in enumerate(plan.buckets):
        origins, reads = plan.traced.origins_of(bucket.layout), plan.reads[index]
        found.append([])
        for reader in range(num_readers):
            rank = num_trainers + reader
            parts = plan_reader(rank, len(reads), reads[rank], origins, plan.traced.owners)
            nbytes = reads[rank].nbytes
            found[index].append(received(parts, plan.nums_pieces[index], nbytes))
            for owner in range(num_trainers):
                pair_bytes[owner][reader] += sum(part.nbytes for part in parts[owner])
    return found, pair_bytes


def first_difference(plan: ShardPlan, batches: Iterator[Batch], device: torch.device) -> str | None:
    """Pack every bucket, and compare what each engine rank would find with the full export's;
    nothing travels. What differs first on this rank, or what went wrong; None if nothing.
    """
    return first_problem(plan.buckets, batches, partial(_difference, plan, device))


def _difference(
    plan: ShardPlan, device: torch.device, index: int, tensors: Sequence[torch.Tensor] | None
) -> str | None:
    if tensors is None:
        return None
    numbers, first = plan.all_to_all.numbers_of(index), plan.first_reader
    for rank, arrangement in enumerate(plan.reads[index][first:], first):
        whole = gather_arranged(tensors, arrangement, device)
        found = received([plan.drafts[index].sends[rank]], len(numbers))
        start = 0  # of what one all-to-all brings; no piece comes in two of them
        for number in numbers:  # packed for each engine rank anew: the scratch holds two of them
            packed, sizes = plan.all_to_all.pack(number)
            part = packed.split(list(sizes))[rank]
            stop = start + part.numel()
            for piece in found.pieces:
                if start <= piece.offset < stop:
                    expected = whole[piece.start : piece.start + piece.nbytes]
                    arrived = part[piece.offset - start :][: piece.nbytes]
                    if not torch.equal(expected, arrived):
                        return f"bucket {index}, byte {piece.start}, differs from the full export"
            start = stop
        if start != sum(map(sum, found.sizes)):
            return f"bucket {index} is sent in {start} bytes, {found.sizes} are received"
    return None
