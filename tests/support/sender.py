"""Syncs of trainer ranks to engines on devices of their own, in disaggregated mode.

with Ranks(folder, urls) as ranks:
    senders = Senders(ranks, [(url, tp)], shards="sent")
    report = senders.sync(0.5, "compiled")
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from support.exports import ShardedExport
from support.hosts import loopback
from support.settings import settings_of
from support.trainer import Ranks, TrainerRank
from verl_sglang_sync.engine.server_client.client import SGLangServerClient
from verl_sglang_sync.engine.update_groups import Replica
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.sync.topologies import disaggregated_sync
from verl_sglang_sync.trainer_ranks import TrainerRanks, WeightSyncError

Targets = Sequence[tuple[str, int]]
"""Servers' URLs and their numbers of TP ranks."""


class Sender:
    """One weight sync for each mode.

    Args:
        rank: whose; the first has the groups with the engines.
        targets: the engines.
        timeout_s: of requests, sessions and groups.
        address: where the groups meet; None: a loopback address, IPv6's in mode "compiled".
        settings: other keys of the preset.
    """

    def __init__(
        self,
        rank: TrainerRank,
        targets: Targets,
        timeout_s: float = 60,
        address: str | None = None,
        **settings: Any,
    ) -> None:
        self._rank, self._targets, self._timeout_s = rank, targets, timeout_s
        self._address, self._settings = address, settings
        self._timeouts_s: dict[str, float] = settings.get("timeouts_s", {})
        self._made: dict[str, Any] = {}
        self._groups_seen: set[tuple[str, str]] = set()

    def sync(
        self,
        weights: Any,
        mode: str = "flattened",
        members: Sequence[int] | None = None,
        version: str = "v",
    ) -> dict[str, Any]:
        """Sync to some of the targets, or to all; the report."""
        members = range(len(self._targets)) if members is None else members
        replicas = [
            Replica(identity=url, base_url=url, client=self._client(url), num_ranks=tp)
            for url, tp in (self._targets[i] for i in members)
        ]
        report = SyncReport(mode=mode, replica=None)
        weight_sync = self._weight_sync(mode)
        asyncio.run(weight_sync.sync(weights, version=version, report=report, replicas=replicas))
        return asdict(report)

    def attempt(
        self, weights: Any, members: Sequence[int] | None = None, mode: str = "flattened"
    ) -> dict[str, Any]:
        """Sync; how it failed, if it did, and the seconds."""
        started, error = time.monotonic(), "no error"
        try:
            self.sync(weights, mode, members)
        except WeightSyncError as raised:
            error = str(raised)
        return {"error": error, "seconds": time.monotonic() - started}

    def _client(self, url: str) -> SGLangServerClient:
        return SGLangServerClient(url, timeout_s=self._timeout_s, timeouts_s=self._timeouts_s)

    def num_formed(self, mode: str) -> int:
        """How many groups this rank's syncs have had; to be asked after each good one."""
        groups = self._weight_sync(mode)._engines._groups
        if groups is not None:
            self._groups_seen.add((mode, groups.current.name))
        return sum(seen == mode for seen, _ in self._groups_seen)

    def close(self) -> None:
        """Dissolve the groups."""
        for weight_sync in self._made.values():
            groups = weight_sync._engines._groups
            if groups is not None and groups.current is not None:
                groups._dissolve(groups.current)

    def _weight_sync(self, mode: str) -> Any:
        if mode not in self._made:
            address = self._address or (loopback() if mode == "compiled" else "127.0.0.1")
            limit_s = self._timeout_s
            self._made[mode] = disaggregated_sync(
                address=address if self._rank.rank == 0 else None,
                settings=settings_of(mode, request_timeout_s=limit_s, **self._settings),
                ranks=TrainerRanks(timeout_s=limit_s),
                device=self._rank.device,
            )
        return self._made[mode]


class Senders:
    """The `Sender` of each of some trainer ranks, which sync together.

    Args:
        ranks: the trainer.
        targets: the engines.
        shards: what is exported lies in shards on all ranks; None: each has all of it. "mapped":
            engines on this host can map them, too.
        settings: more arguments of `Sender`.
    """

    def __init__(
        self, ranks: Ranks, targets: Targets, *, shards: str | None = None, **settings: Any
    ) -> None:
        self._ranks = ranks
        ranks.run(_open, targets, shards, settings)

    def sync(
        self, scale: float = 1.0, mode: str = "flattened", members: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Sync the weights times `scale`; the first rank's report, and `num_formed` so far."""
        report: dict[str, Any] = self._ranks.run(_sync, scale, mode, members)[0]
        return report

    def until_sent(self) -> int:
        """Sync the weights as they are until shards are sent; the number of buckets that are."""
        for _ in range(4):
            if num_sent := self.sync(mode="compiled")["num_sent"]:
                return int(num_sent)
        return 0

    def attempt(self, export: Callable[[TrainerRank], Any], **where: Any) -> list[dict[str, Any]]:
        """`Sender.attempt` of what `export` makes on each rank, by rank."""
        return self._ranks.run(lambda rank: rank.kept["sender"].attempt(export(rank), **where))


def _open(
    rank: TrainerRank, targets: Targets, shards: str | None, settings: dict[str, Any]
) -> None:
    if "sender" in rank.kept:
        rank.kept["sender"].close()
    rank.kept["sender"] = Sender(rank, targets, **settings)
    rank.kept["export"] = shards and ShardedExport(rank.weights(), is_mappable=shards == "mapped")


def _sync(rank: TrainerRank, scale: float, mode: str, members: Any) -> dict[str, Any]:
    sender, export, weights = rank.kept["sender"], rank.kept["export"], rank.weights(scale)
    if export is not None:
        export.write(weights)
    report = sender.sync(weights if export is None else export.reexport(), mode, members)
    return {**report, "num_formed": sender.num_formed(mode)}
