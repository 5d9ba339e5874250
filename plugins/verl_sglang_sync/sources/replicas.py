"""Compares the copies of a shard that several trainer ranks hold, and that should be equal.

    difference = differing_replicas(traced, now, all_ranks, device)   # None: all are equal

An engine rank reads a shard from the holder that is nearest to it. If holders differ, then engines
serve different models, and the TP ranks of one engine may serve parts of different models. verl's
own export does the same: each trainer rank exports its own copy to the engine rank on its GPU.
Torch's FSDP1 trains such copies apart with `fsdp_size=1`: it does not reduce their gradients.

Each rank takes a digest of each of its shards, in one launch, and sends one digest for each set of
holders. Only after a difference they send the digests of all shards, to find its name.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang_loader.common.copies.strided import synchronize
from sglang_loader.common.digest import digests_on_host
from sglang_loader.common.ranks import Ranks as AllRanks
from verl_sglang_sync.ranks import ReplicasDiffer, own_rank
from verl_sglang_sync.report import logger, warn_once
from verl_sglang_sync.sources.export_trace import TracedExport
from verl_sglang_sync.sources.snapshot import memory_of
from verl_sglang_sync.sources.transfer_plan import nearest

Ranks = tuple[int, ...]

Digests = dict[Ranks, list[tuple[str, tuple[int, ...]]]]
"""By holders of the shards: names of parameters, and the digests of this rank's shards of them."""


@dataclass(frozen=True)
class ReplicaDifference:
    """A parameter of which trainer ranks hold different copies.

    Attributes:
        parameter: the first one, by its name among the sources.
        copies: ranks that hold the same bytes of a shard, at least two such sets.
    """

    parameter: str
    copies: tuple[Ranks, ...]

    def __str__(self) -> str:
        sets = [f"ranks {', '.join(map(str, ranks))}" for ranks in self.copies]
        return f"{self.parameter} has other values on {' than on '.join(sets)}"

    def is_mixed(self, readers: Iterable[int]) -> bool:
        """True if engine ranks with these numbers would read different copies."""
        copy_of = {rank: number for number, ranks in enumerate(self.copies) for rank in ranks}
        holders = sorted(copy_of)
        return len({copy_of[nearest(holders, reader)] for reader in readers}) > 1


def differing_replicas(
    traced: TracedExport,
    now: Mapping[str, torch.Tensor],
    all_ranks: AllRanks,
    device: torch.device,
) -> ReplicaDifference | None:
    """Compare the copies of all shards that several ranks hold; collective.

    Args:
        traced: merged, the same on all ranks.
        now: this rank's tensors, by name.

    Returns:
        The first difference, the same on all ranks. None if there is none, or if a rank cannot take
        the digests, which is a warning.
    """
    if all(len(ranks) == 1 for owners in traced.owners for ranks in owners.holders):
        return None
    own, failed = all_ranks.step(lambda: _own_digests(traced, now, device))
    if own is None:
        warn_once(f"the trainer ranks' copies of parameters are not compared: {failed}")
        return None
    sums = {ranks: hashlib.sha256(repr(found).encode()).digest() for ranks, found in own.items()}
    differing = _unequal(all_ranks.gather(sums))
    if differing is None:
        return None
    by_rank = all_ranks.gather(own[differing] if own_rank() in differing else [])
    for number, (parameter, _) in enumerate(by_rank[differing[0]]):
        copies: defaultdict[object, list[int]] = defaultdict(list)
        for rank in differing:
            copies[by_rank[rank][number]].append(rank)
        if len(copies) > 1:
            return ReplicaDifference(parameter, tuple(map(tuple, copies.values())))
    return None


def _own_digests(
    traced: TracedExport, now: Mapping[str, torch.Tensor], device: torch.device
) -> Digests:
    own = own_rank()
    held = [
        (ranks, parameter.source)
        for parameter in traced.parameters
        for ranks in parameter.owners.holders
        if len(ranks) > 1 and own in ranks
    ]
    shards = [memory_of(now[source]) for _, source in held]
    synchronize(device)  # what other streams still write
    own_digests: Digests = {}
    for (ranks, source), found in zip(held, digests_on_host(shards).tolist(), strict=True):
        own_digests.setdefault(ranks, []).append((source, tuple(found)))
    return own_digests


def _unequal(by_rank: Sequence[Mapping[Ranks, bytes]]) -> Ranks | None:
    """The first holders that do not have the same digest, or None."""
    for found in by_rank:
        for ranks in found:
            if len({by_rank[rank].get(ranks) for rank in ranks}) > 1:
                return ranks
    return None


def check_replicas(
    difference: ReplicaDifference | None,
    readers: Sequence[tuple[object, int]],
    all_ranks: AllRanks,
) -> None:
    """Raise on all ranks if an engine's TP ranks would read different copies; collective if there
    is a difference. Engines that serve different models, each of them whole, are a warning.

    Args:
        readers: this rank's engine ranks: what their rollout replica is known by, equal for those
            of one replica, and their number among all.

    Raises:
        ReplicasDiffer: names the parameter and the ranks.
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
    if any(map(difference.is_mixed, by_replica.values())):
        raise ReplicasDiffer(
            "weight sync refused: the TP ranks of one engine would hold parts of different models, "
            f"and would with verl's own weight sync. {cause}"
        )
    if own_rank() == 0:
        logger.warning("Rollouts come from different models, by replica. %s", cause)
