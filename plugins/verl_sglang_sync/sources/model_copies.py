"""Compares the copies of a shard that several trainer ranks hold, and that should be equal.

    differences = differing_copies(traced, parameters, all_ranks, device)   # collective
    check_copies(differences, readers, all_ranks, holder)   # raises if an engine would mix copies

An engine rank reads a shard from one of its holders. If the holders' copies differ, engines serve
different models, and the TP ranks of one engine may serve parts of different models. With verl's
own update they would, too: each trainer rank exports its own copy to the engine rank on its GPU.
FSDP1 with `fsdp_size=1` lets copies drift apart, because it does not reduce their gradients.

Each rank takes the digests of its shards in one launch, and sends one digest for each set of
holders. If some differ, their holders send the digests of all shards, to find the parameters.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sglang_loader.common.copies.strided import synchronize
from sglang_loader.common.digest import digests_on_host
from sglang_loader.common.ranks import Ranks as AllRanks
from verl_sglang_sync.report import logger, warn_once
from verl_sglang_sync.sources.export_trace import TracedExport
from verl_sglang_sync.sources.snapshot import memory_of
from verl_sglang_sync.trainer_ranks import CopiesDiffer, own_rank

Ranks = tuple[int, ...]

Holder = Callable[[Sequence[int], int], int]
"""A function of a shard's holders and of an engine rank's number: the holder that it reads from."""

Digests = dict[Ranks, list[tuple[str, tuple[int, ...]]]]
"""The names of parameters and the digests of this rank's shards, by the shards' holders."""


@dataclass(frozen=True)
class CopyDifference:
    """A way in which the copies of trainer ranks differ.

    Attributes:
        parameter: name of the first parameter whose copies differ in this way.
        copies: at least two sets of ranks. The ranks of one set hold equal copies.
    """

    parameter: str
    copies: tuple[Ranks, ...]

    def __str__(self) -> str:
        sets = [f"ranks {', '.join(map(str, ranks))}" for ranks in self.copies]
        return f"{self.parameter} has other values on {' than on '.join(sets)}"

    def is_mixed(self, readers: Iterable[int], holder: Holder) -> bool:
        """Return True if engine ranks with these numbers would read different copies."""
        copy_of = {rank: number for number, ranks in enumerate(self.copies) for rank in ranks}
        holders = sorted(copy_of)
        return len({copy_of[holder(holders, reader)] for reader in readers}) > 1


def differing_copies(
    traced: TracedExport,
    parameters: Mapping[str, torch.Tensor],
    all_ranks: AllRanks,
    device: torch.device,
) -> list[CopyDifference]:
    """Compare the copies of all shards that several ranks hold. Collective.

    Args:
        traced: the merged trace, the same on all ranks.
        parameters: this rank's tensors, by name.

    Returns:
        Every way in which copies differ, the same on all ranks. None of them, with a warning, if a
        rank cannot take the digests.
    """
    if all(len(ranks) == 1 for owners in traced.owners for ranks in owners.holders):
        return []
    own, failed = all_ranks.step(partial(_own_digests, traced, parameters, device))
    if own is None:
        warn_once(f"the trainer ranks' copies of parameters are not compared: {failed}")
        return []
    # One digest for each set of holders keeps the messages small.
    sums = {ranks: hashlib.sha256(repr(rows).encode()).digest() for ranks, rows in own.items()}
    # The first parameter of each way to differ, by the copies.
    found: dict[tuple[Ranks, ...], str] = {}
    for holders in _unequal(all_ranks.gather(sums)):
        # Only now send the digests of all shards, to find the parameters that differ.
        by_rank = all_ranks.gather(own[holders] if own_rank() in holders else [])
        for number, (parameter, _) in enumerate(by_rank[holders[0]]):
            copies: defaultdict[object, list[int]] = defaultdict(list)
            for rank in holders:
                copies[by_rank[rank][number]].append(rank)
            if len(copies) > 1:
                found.setdefault(tuple(map(tuple, copies.values())), parameter)
    return [CopyDifference(parameter, copies) for copies, parameter in found.items()]


def _own_digests(
    traced: TracedExport, parameters: Mapping[str, torch.Tensor], device: torch.device
) -> Digests:
    """Take digests of all shards that this rank and others hold."""
    own = own_rank()
    held = [
        (ranks, parameter.source)
        for parameter in traced.parameters
        for ranks in parameter.owners.holders
        if len(ranks) > 1 and own in ranks
    ]
    shards = [memory_of(parameters[source]) for _, source in held]
    synchronize(device)  # other streams may still write to the parameters
    own_digests: Digests = {}
    for (ranks, source), digest in zip(held, digests_on_host(shards).tolist(), strict=True):
        own_digests.setdefault(ranks, []).append((source, tuple(digest)))
    return own_digests


def _unequal(by_rank: Sequence[Mapping[Ranks, bytes]]) -> list[Ranks]:
    """Return the sets of holders whose digests differ."""
    holders = dict.fromkeys(ranks for digest_by_holders in by_rank for ranks in digest_by_holders)
    return [ranks for ranks in holders if len({by_rank[rank].get(ranks) for rank in ranks}) > 1]


def check_copies(
    differences: Sequence[CopyDifference],
    readers: Sequence[tuple[object, int]],
    all_ranks: AllRanks,
    holder: Holder,
) -> None:
    """Refuse differences that would give the TP ranks of one engine parts of different models.

    Collective if there are differences. If each engine would serve a whole model, but not the same
    one, the first rank logs a warning.

    Args:
        differences: the same on all ranks.
        readers: for each of this rank's engine ranks the identity of its replica, and its number
            among all engine ranks.
        holder: which of a shard's holders an engine rank reads from.

    Raises:
        CopiesDiffer: on all ranks, with the parameter's name and the ranks.
    """
    if not differences:
        return
    by_replica: defaultdict[object, list[int]] = defaultdict(list)
    for of_rank in all_ranks.gather(list(readers)):
        for replica, number in of_rank:
            by_replica[replica].append(number)
    mixed = [
        difference
        for difference in differences
        if any(difference.is_mixed(readers, holder) for readers in by_replica.values())
    ]
    worst = (mixed or differences)[0]
    cause = (
        f"The trainer's ranks have drifted apart: {worst}. Their optimizers do not share "
        "gradients, as with fsdp_size=1 under FSDP1 (verl issue 7493). Set "
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=-1, or use strategy=fsdp2."
    )
    if mixed:
        raise CopiesDiffer(
            "weight sync refused: the TP ranks of one engine would hold parts of different models, "
            f"also with verl's own weight sync. {cause}"
        )
    if own_rank() == 0:  # one line for all ranks
        logger.warning("Replicas of the rollout serve different models. %s", cause)
