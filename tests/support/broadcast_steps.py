"""What trainer ranks do in disaggregated mode: syncs to replicas that come and go, and faults."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from support.engine_hash import HASH_LOADER
from support.engine_steps import weights_of
from support.sglang_server import free_port, loopback
from support.trainer import NamedTensors, TrainerRank
from verl_sglang_sync.engine.server_client import ServerError, SGLangServerClient, operations

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
    sender = Sender(rank, [(url, tp) for url, tp in targets])
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
    at = [(url, tp) for url, tp in targets]
    sender = Sender(rank, at, timeout_s=20)
    blind = Sender(rank, at, timeout_s=20, manifest_check="off")
    good = weights_of(Path(model), rank.device)
    doubled = [(n, torch.cat([t, t]) if n == "model.norm.weight" else t) for n, t in good]
    meta = [(n, t.to("meta") if n == "model.norm.weight" else t) for n, t in good]
    everyone = tuple(range(len(targets)))
    seen: dict[str, Any] = {}
    changed = [*good[:-1], (f"{good[-1][0]}_of_another", good[-1][1])]
    alone = doubled if rank.rank == 1 else good  # a rank whose tensors are not sent
    for name, bad, faulty in (
        ("shape", doubled, blind),
        ("manifest", changed, sender),
        ("cannot pack", meta, sender),
        ("other tensors on one rank", alone, sender),
    ):
        faulty.sync(good, "flattened", everyone)
        seen[name] = faulty.attempt(bad, everyone)
        faulty.sync(good, "flattened", everyone)
        seen[name]["hashes"] = sender.hashes(Path(folder))
    return seen


def broadcast_among_strangers(
    rank: TrainerRank, model: str, folder: str, targets: list[list[Any]]
) -> dict[str, Any]:
    """What others send with the trainer's group: how it is answered, and a good sync after it."""
    sender = Sender(rank, [(url, tp) for url, tp in targets], timeout_s=20)
    good = weights_of(Path(model), rank.device)
    everyone = tuple(range(len(targets)))
    sent: list[Any] = []
    make = operations.update_weights

    def recorded(*args: Any, **fields: Any) -> Any:
        sent.append(make(*args, **fields))
        return sent[-1]

    with mock.patch.object(operations, "update_weights", recorded):
        sender.sync(good, "flattened", everyone)
    answers: dict[str, Any] = {}
    if not rank.rank:
        first = dict(sent[0].payload)
        descriptor = json.loads(base64.b64decode(first["serialized_named_tensors"][0]))
        group, later = descriptor["group"], {**descriptor, "timeout_s": 1000.0}
        changed = [base64.b64encode(json.dumps(later).encode()).decode()]
        stock = operations.update_from_distributed(["a"], ["uint8"], [[8]], group_name=group)
        with SGLangServerClient(targets[0][0], timeout_s=20) as client:
            for name, call in (
                ("repeated", sent[0]),
                (
                    "changed",
                    replace(sent[0], payload=first | {"serialized_named_tensors": changed}),
                ),
                ("in sglang's format", stock),
            ):
                try:
                    client.run(call)
                    answers[name] = "no error"
                except ServerError as error:
                    answers[name] = str(error)
            sender.sync(good, "flattened", everyone)
            client.run(operations.destroy_update_group(group))
    else:
        sender.sync(good, "flattened", everyone)
    sender.sync(good, "flattened", everyone)
    formed = sender.num_formed("flattened")
    return {"answers": answers, "hashes": sender.hashes(Path(folder)), "num_formed": formed}


def broadcast_to_a_dying_server(
    rank: TrainerRank, model: str, targets: list[list[Any]], pids: list[int]
) -> dict[str, Any]:
    """The second server is killed between two buckets; returns the error and the seconds."""
    import os
    import signal

    sender = Sender(rank, [(url, tp) for url, tp in targets], timeout_s=20)
    weights = weights_of(Path(model), rank.device)
    sender.sync(weights, "flattened", (0, 1))

    def export() -> Any:
        for i, pair in enumerate(weights):
            if i == len(weights) // 2 and rank.rank == 0:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
            yield pair

    seen = sender.attempt(export(), (0, 1))
    sender.sync(weights, "flattened", (0,))  # without the dead one
    return seen


def broadcast_that_one_refuses(
    rank: TrainerRank, model: str, folder: str, targets: list[list[Any]]
) -> dict[str, Any]:
    """The second server has a group of the new one's name already, and refuses to join."""
    sender = Sender(rank, [(url, tp) for url, tp in targets])
    good = weights_of(Path(model), rank.device)
    seen: dict[str, Any] = {}

    with mock.patch("secrets.token_hex", return_value="taken"):
        if rank.rank == 0:
            url, tp = targets[1]
            with SGLangServerClient(url, timeout_s=60) as client:
                client.run(
                    operations.init_update_group(
                        master_address="127.0.0.1",
                        master_port=free_port(),
                        rank_offset=0,
                        world_size=tp,
                        group_name="weight_sync_taken",
                        backend="gloo",
                    )
                )
        seen["refused"] = sender.attempt(good, (0, 1))
    seen["the other alone"] = sender.attempt(good, (0,))
    seen["both again"] = sender.attempt(good, (0, 1))
    return seen | {"hashes": sender.hashes(Path(folder))}


def syncs_and_faults(
    rank: TrainerRank, model: str, folder: str, targets: list[list[Any]], pids: list[int]
) -> dict[str, Any]:
    """All of the above in one trainer start; the second server does not survive it."""
    return {
        "syncs": broadcast_syncs(rank, model, folder, targets),
        "faults": broadcast_faults(rank, model, folder, targets),
        "strangers": broadcast_among_strangers(rank, model, folder, targets),
        "refusal": broadcast_that_one_refuses(rank, model, folder, targets),
        "death": broadcast_to_a_dying_server(rank, model, targets, pids),
    }


# (the weights' scale, mode): "compiled" makes its plan in its first sync and replays it after that
ONE_REPLICA: tuple[tuple[float, str], ...] = (
    (0.5, "flattened"),
    (1.0, "flattened"),
    (0.5, "compiled"),
    (2.0, "compiled"),
    (1.0, "compiled"),
)


def syncs_to_one_replica(rank: TrainerRank, model: str, folder: str, url: str) -> dict[str, Any]:
    """Go through `ONE_REPLICA`, then a sync that fails and one that is good again."""
    sender = Sender(rank, [(url, 1)])
    weights = {
        scale: weights_of(Path(model), rank.device, scale=scale) for scale in (0.5, 1.0, 2.0)
    }
    seen: dict[str, Any] = {"reference": sender.hashes(Path(folder))[0], "syncs": []}

    def sync(scale: float, mode: str) -> None:
        report = sender.sync(weights[scale], mode, (0,))
        hashes = sender.hashes(Path(folder))[0]
        formed = sender.num_formed(mode)
        seen["syncs"].append({"hashes": hashes, "report": report, "num_formed": formed})

    for scale, mode in ONE_REPLICA:
        sync(scale, mode)
    doubled = [(n, torch.cat([t, t]) if n == "model.norm.weight" else t) for n, t in weights[1.0]]
    seen |= sender.attempt(doubled, (0,))
    sync(0.5, "flattened")
    sync(1.0, "compiled")
    sender.close()
    return seen


class Sender:
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

    def sync(
        self, weights: Any, mode: str, members: Sequence[int], version: str = "v"
    ) -> dict[str, Any]:
        from verl_sglang_sync.engine.update_groups import Replica
        from verl_sglang_sync.report import SyncReport

        transport, _ = self._transport(mode)
        replicas = [
            Replica(identity=url, base_url=url, num_ranks=tp)
            for url, tp in (self._targets[i] for i in members)
        ]
        report = SyncReport(mode=mode, replica=None)
        transport.sync(weights, replicas, version=version, report=report)
        return asdict(report)

    def attempt(self, weights: Any, members: Sequence[int]) -> dict[str, Any]:
        """Sync, by the eager loader; how it failed, if it did, and the seconds."""
        from verl_sglang_sync import WeightSyncError

        started = time.monotonic()
        try:
            self.sync(weights, "flattened", members)
            error = "no error"
        except WeightSyncError as raised:
            error = str(raised)
        return {"error": error, "seconds": time.monotonic() - started}

    def num_formed(self, mode: str) -> int:
        groups = self._transport(mode)[1]
        return 0 if groups is None else groups.num_formed

    def close(self) -> None:
        for _, groups in self._made.values():
            if groups is not None:
                groups.close()

    def hashes(self, folder: Path) -> list[list[dict[str, str]]]:
        """By target and TP rank, taken in the engines' processes; empty on other ranks."""
        from support.ipc import serialize_handles

        if self._rank.rank:
            return []
        seen = []
        for url, tp in self._targets:
            device = self._rank.device
            tensors: NamedTensors = [
                (str(folder), torch.zeros(1, device=device)) for _ in range(tp)
            ]
            handles = [serialize_handles([pair]) for pair in tensors]

            with SGLangServerClient(url, timeout_s=60) as client:
                client.run(operations.update_weights(handles, load_format=HASH_LOADER))
            seen.append([json.loads((folder / f"rank{r}.json").read_text()) for r in range(tp)])
        return seen

    def _transport(self, mode: str) -> tuple[Any, Any]:
        from verl_sglang_sync.collective import TorchTrainerGroup
        from verl_sglang_sync.config import WeightSyncConfig
        from verl_sglang_sync.engine.update_groups import UpdateGroups
        from verl_sglang_sync.routes.broadcast import BroadcastTransport

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
                    address=loopback() if mode == "compiled" else "127.0.0.1",
                    device=self._rank.device,
                    timeout_s=self._timeout_s,
                )
            transport = BroadcastTransport(
                groups=groups,
                settings=settings,
                agree=TorchTrainerGroup(timeout_s=self._timeout_s).agree,
                device=self._rank.device,
            )
            self._made[mode] = transport, groups
        return self._made[mode]
