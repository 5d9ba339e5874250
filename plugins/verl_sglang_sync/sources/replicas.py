"""Compares the copies of a shard that several trainer ranks hold, and that should be equal.

    difference = differing_replicas(traced, parameters, all_ranks, device)    # collective
    check_replicas(difference, readers, all_ranks, holder)    # raises if an engine would mix copies

An engine rank reads a shard from one of its holders. If the holders' copies differ, engines serve
different models, and the TP ranks of one engine may serve parts of different models. With verl's
own update they would, too: each trainer rank exports its own copy to the engine rank on its GPU.
FSDP1 with `fsdp_size=1` lets copies drift apart, because it does not reduce their gradients.

Each rank takes the digests of its shards in one launch, and sends one digest for each set of
holders. If these differ, the holders send the digests of all shards, to find the parameter's name.
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
from verl_sglang_sync.ranks import ReplicasDiffer, own_rank
from verl_sglang_sync.report import logger, warn_once
from verl_sglang_sync.sources.export_trace import TracedExport
from verl_sglang_sync.sources.snapshot import memory_of

Ranks = tuple[int, ...]

Holder = Callable[[Sequence[int], int], int]
"""A function of a shard's holders and of an engine rank's number: the holder that it reads from."""

Digests = dict[Ranks, list[tuple[str, tuple[int, ...]]]]
"""The names of parameters and the digests of this rank's shards, by the shards' holders."""


@dataclass(frozen=True)
class ReplicaDifference:
    """The first parameter of which trainer ranks hold different copies.

    Attributes:
        parameter: name of the parameter among the sources.
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


def differing_replicas(
    traced: TracedExport,
    parameters: Mapping[str, torch.Tensor],
    all_ranks: AllRanks,
    device: torch.device,
) -> ReplicaDifference | None:
    """Compare the copies of all shards that several ranks hold. Collective.

    Args:
        traced: the merged trace, the same on all ranks.
        parameters: this rank's tensors, by name.

    Returns:
        The first difference, the same on all ranks, or None if there is none. None with a warning
        if a rank cannot take the digests.
    """
    if all(len(ranks) == 1 for owners in traced.owners for ranks in owners.holders):
        return None
    own, failed = all_ranks.step(partial(_own_digests, traced, parameters, device))
    if own is None:
        warn_once(f"the trainer ranks' copies of parameters are not compared: {failed}")
        return None
    # One digest for each set of holders keeps the messages small.
    sums = {ranks: hashlib.sha256(repr(rows).encode()).digest() for ranks, rows in own.items()}
    differing = _unequal(all_ranks.gather(sums))
    if differing is None:
        return None
    # Only now send the digests of all shards, to find the first parameter that differs.
    by_rank = all_ranks.gather(own[differing] if own_rank() in differing else [])
    for number, (parameter, _) in enumerate(by_rank[differing[0]]):
        copies: defaultdict[object, list[int]] = defaultdict(list)
        for rank in differing:
            copies[by_rank[rank][number]].append(rank)
        if len(copies) > 1:
            return ReplicaDifference(parameter, tuple(map(tuple, copies.values())))
    return None


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


def _unequal(by_rank: Sequence[Mapping[Ranks, bytes]]) -> Ranks | None:
    """Return the first set of holders whose digests differ, or None."""
    for digest_by_holders in by_rank:
        for ranks in digest_by_holders:
            if len({by_rank[rank].get(ranks) for rank in ranks}) > 1:
                return ranks
    return None


def check_replicas(
    difference: ReplicaDifference | None,
    readers: Sequence[tuple[object, int]],
    all_ranks: AllRanks,
    holder: Holder,
) -> None:
    """Refuse a difference that would give the TP ranks of one engine parts of different models.

    Collective if there is a difference. If each engine would serve a whole model, but not the same
    one, the first rank logs a warning.

    Args:
        difference: the same on all ranks.
        readers: for each of this rank's engine ranks the identity of its replica, and its number
            among all engine ranks.
        holder: which of a shard's holders an engine rank reads from.

    Raises:
        ReplicasDiffer: on all ranks, with the parameter's name and the ranks.
    """
    if difference is None:
        return
    by_replica: defaultdict[object, list[int]] = defaultdict(list)
    for of_rank in all_ranks.gather(list(readers)):
        for replica, number in of_rank:
            by_replica[replica].append(number)
    cause = (
        f"The trainer's ranks have drifted apart: {difference}. Their optimizers do not share "
        "gradients, as with fsdp_size=1 under FSDP1 (verl issue 7493). Set "
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=-1, or use strategy=fsdp2."
    )
    if any(difference.is_mixed(readers, holder) for readers in by_replica.values()):
        raise ReplicasDiffer(
            "weight sync refused: the TP ranks of one engine would hold parts of different models, "
            f"also with verl's own weight sync. {cause}"
        )
    if own_rank() == 0:  # one line for all ranks
        logger.warning("Replicas of the rollout serve different models. %s", cause)
