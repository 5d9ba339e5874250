"""What trainer ranks do in disaggregated mode: syncs to replicas that come and go, and faults."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from support.engine_hash import HASH_LOADER
from support.engine_steps import weights_of
from support.trainer import NamedTensors, TrainerRank

Target = tuple[str, int]
"""A server's URL and its number of TP ranks."""

# (what happens, the weights' scale, mode, which targets take part)
PLAN: tuple[tuple[str, float, str, tuple[int, ...]], ...] = (
    ("one replica", 0.5, "flattened", (0,)),
    ("the same again", 0.25, "flattened", (0,)),
    ("one joins", 2.0, "flattened", (0, 1)),
    ("compiled: the plan is made", 0.5, "compiled", (0, 1)),
    ("compiled: replayed", 4.0, "compiled", (0, 1)),
    ("one leaves", 1.0, "flattened", (1,)),
    ("it comes back", 1.0, "flattened", (0, 1)),
)


def broadcast_syncs(
    rank: TrainerRank, model: str, folder: str, targets: list[list[Any]]
) -> dict[str, Any]:
    """Go through `PLAN`; returns hashes of all targets and the report after each sync."""
    sender = _Sender(rank, [(url, tp) for url, tp in targets])
    seen: dict[str, Any] = {"reference": sender.hashes(Path(folder)), "syncs": []}
    for what, scale, mode, members in PLAN:
        report = sender.sync(weights_of(Path(model), rank.device, scale=scale), mode, members)
        seen["syncs"].append(
            {
                "what": what,
                "hashes": sender.hashes(Path(folder)),
                "report": report,
                "num_formed": sender.num_formed(mode),
            }
        )
    return seen


def broadcast_faults(
    rank: TrainerRank, model: str, folder: str, targets: list[list[Any]]
) -> dict[str, Any]:
    """Faults that the engines survive, each followed by a good sync."""
    from verl_sglang_sync.weight_sync import WeightSyncError

    at = [(url, tp) for url, tp in targets]
    sender = _Sender(rank, at, timeout_s=20)
    blind = _Sender(rank, at, timeout_s=20, manifest_check="off")
    good = weights_of(Path(model), rank.device)
    doubled = [(n, torch.cat([t, t]) if n == "model.norm.weight" else t) for n, t in good]
    meta = [(n, t.to("meta") if n == "model.norm.weight" else t) for n, t in good]
    everyone = tuple(range(len(targets)))
    seen: dict[str, Any] = {}
    changed = [*good[:-1], (f"{good[-1][0]}_of_another", good[-1][1])]
    for name, bad, faulty in (
        ("shape", doubled, blind),
        ("manifest", changed, sender),
        ("cannot pack", meta, sender),
    ):
        if name != "manifest":
            faulty.sync(good, "flattened", everyone)
        started = time.monotonic()
        try:
            faulty.sync(bad, "flattened", everyone)
            error = "no error"
        except WeightSyncError as raised:
            error = str(raised)
        seen[name] = {"error": error, "seconds": time.monotonic() - started}
        if name != "manifest":
            faulty.sync(good, "flattened", everyone)
        seen[name]["hashes"] = sender.hashes(Path(folder))
    return seen


def broadcast_to_a_dying_server(
    rank: TrainerRank, model: str, targets: list[list[Any]], pids: list[int]
) -> dict[str, Any]:
    """The second server is killed between two buckets; returns the error and the seconds."""
    import os
    import signal

    from verl_sglang_sync.weight_sync import WeightSyncError

    sender = _Sender(rank, [(url, tp) for url, tp in targets], timeout_s=20)
    weights = weights_of(Path(model), rank.device)
    sender.sync(weights, "flattened", (0, 1))

    def export() -> Any:
        for i, pair in enumerate(weights):
            if i == len(weights) // 2 and rank.rank == 0:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
            yield pair

    started = time.monotonic()
    try:
        sender.sync(export(), "flattened", (0, 1))
        error = "no error"
    except WeightSyncError as raised:
        error = str(raised)
    seconds = time.monotonic() - started
    sender.sync(weights, "flattened", (0,))  # without the dead one
    return {"error": error, "seconds": seconds}


def syncs_and_faults(
    rank: TrainerRank, model: str, folder: str, targets: list[list[Any]], pids: list[int]
) -> dict[str, Any]:
    """All of the above in one trainer start; the second server does not survive it."""
    return {
        "syncs": broadcast_syncs(rank, model, folder, targets),
        "faults": broadcast_faults(rank, model, folder, targets),
        "death": broadcast_to_a_dying_server(rank, model, targets, pids),
    }


class _Sender:
    """The disaggregated transports of one trainer rank, one for each mode."""

    def __init__(
        self,
        rank: TrainerRank,
        targets: Sequence[Target],
        timeout_s: float = 60,
        manifest_check: str = "error",
    ) -> None:
        self._manifest_check = manifest_check
        self._rank = rank
        self._targets = targets
        self._timeout_s = timeout_s
        self._made: dict[str, tuple[Any, Any]] = {}

    def sync(self, weights: Any, mode: str, members: Sequence[int]) -> dict[str, Any]:
        from verl_sglang_sync.report import SyncReport
        from verl_sglang_sync.update_groups import Replica

        transport, _ = self._transport(mode)
        replicas = [
            Replica(identity=url, base_url=url, num_ranks=tp)
            for url, tp in (self._targets[i] for i in members)
        ]
        report = SyncReport(mode=mode, replica=None)
        transport.sync(weights, replicas, version="v", report=report)
        return asdict(report)

    def num_formed(self, mode: str) -> int:
        groups = self._transport(mode)[1]
        return 0 if groups is None else groups.num_formed

    def hashes(self, folder: Path) -> list[list[dict[str, str]]]:
        """By target and TP rank, taken in the engines' processes; empty on other ranks."""
        from sglang_loader.ipc import serialize_handles
        from verl_sglang_sync.server_client import SGLangServerClient

        if self._rank.rank:
            return []
        seen = []
        for url, tp in self._targets:
            tensors: NamedTensors = [(str(folder), torch.zeros(1)) for _ in range(tp)]
            handles = [serialize_handles([pair]) for pair in tensors]

            async def take(url: str = url, handles: list[bytes] = handles) -> None:
                async with SGLangServerClient(url, timeout_s=60) as client:
                    await client.update_weights(handles, load_format=HASH_LOADER)

            asyncio.run(take())
            seen.append([json.loads((folder / f"rank{r}.json").read_text()) for r in range(tp)])
        return seen

    def _transport(self, mode: str) -> tuple[Any, Any]:
        from verl_sglang_sync.broadcast_transport import BroadcastTransport
        from verl_sglang_sync.collective import agree_on_all_ranks
        from verl_sglang_sync.config import WeightSyncConfig
        from verl_sglang_sync.update_groups import UpdateGroups

        if mode not in self._made:
            settings = WeightSyncConfig(
                mode=mode,  # type: ignore[arg-type]
                request_timeout_s=self._timeout_s,
                manifest_check=self._manifest_check,  # type: ignore[arg-type]
                bucket_bytes=64 << 10,
                multi_stage_wake_up=True,
                free_cache_engine=True,
            )
            groups = None
            if self._rank.rank == 0:
                groups = UpdateGroups(
                    address="127.0.0.1", backend="gloo", timeout_s=self._timeout_s
                )
            transport = BroadcastTransport(
                groups=groups,
                settings=settings,
                agree=agree_on_all_ranks,
                device=self._rank.device,
            )
            self._made[mode] = transport, groups
        return self._made[mode]
