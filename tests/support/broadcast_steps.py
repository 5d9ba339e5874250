"""What trainer ranks do in disaggregated mode: syncs to replicas that come and go, and faults."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

from support.engine_loaders import HASH_LOADER
from support.engine_steps import hashes_of_hosts
from support.exports import ShardedExport, calling_at, doubled, on_meta
from support.settings import settings_of
from support.sglang_server import loopback
from support.stock_update import update_from_distributed
from support.trainer import Hashes, NamedTensors, TrainerRank, read_hashes, run_loader
from verl_sglang_sync.bench.engine_server import free_port
from verl_sglang_sync.engine.server_client import ServerError, SGLangServerClient, operations
from verl_sglang_sync.routes.exchange.all_to_all import AllToAll
from verl_sglang_sync.routes.pull.route import PulledBuckets

Targets = list[tuple[str, int]]
"""Servers' URLs and their numbers of TP ranks."""

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
BOTH = (0, 1)


def broadcast_syncs(rank: TrainerRank, targets: Targets) -> dict[str, Any]:
    """Go through `PLAN`; returns hashes of all targets and the report after each sync."""
    sender = Sender(rank, targets)
    seen: dict[str, Any] = {"reference": sender.hashes(), "syncs": []}
    for what, scale, mode, members in PLAN:
        report = sender.sync(rank.weights(scale), mode, members)
        formed = sender.num_formed(mode)
        found = {"what": what, "hashes": sender.hashes(), "num_formed": formed}
        seen["syncs"].append(found | {"report": report})
    return seen


def syncs_and_faults(rank: TrainerRank, targets: Targets, pids: list[int]) -> dict[str, Any]:
    """All steps of this module in one trainer start; no server survives it."""
    good = rank.weights()
    return {
        "syncs": broadcast_syncs(rank, targets),
        "faults": _faults(rank, good, targets),
        "strangers": _among_strangers(rank, good, targets),
        "refusal": _one_refuses(rank, good, targets),
        "death": _one_dies(rank, good, targets, pids),
    }


def _faults(rank: TrainerRank, good: NamedTensors, targets: Targets) -> dict[str, Any]:
    """Faults that the engines survive, each followed by a good sync."""
    sender = Sender(rank, targets, timeout_s=20)
    blind = Sender(rank, targets, timeout_s=20, manifest_check="off")
    changed = [*good[:-1], (f"{good[-1][0]}_of_another", good[-1][1])]
    alone = doubled(good) if rank.rank == 1 else good  # a rank whose tensors are not sent
    seen: dict[str, Any] = {}
    for name, bad, faulty in (
        ("shape", doubled(good), blind),
        ("manifest", changed, sender),
        ("cannot pack", on_meta(good), sender),
        ("other tensors on one rank", alone, sender),
    ):
        faulty.sync(good)
        seen[name] = faulty.attempt(bad)
        faulty.sync(good)
        seen[name]["hashes"] = sender.hashes()
    return seen


def _among_strangers(rank: TrainerRank, good: NamedTensors, targets: Targets) -> dict[str, Any]:
    """What others send with the trainer's group: how it is answered, and a good sync after it."""
    sender, sent, answers = Sender(rank, targets, timeout_s=20), [], {}
    make = operations.update_weights

    def recorded(*args: Any, **fields: Any) -> Any:
        sent.append(make(*args, **fields))
        return sent[-1]

    with mock.patch.object(operations, "update_weights", recorded):
        sender.sync(good)
    with SGLangServerClient(targets[0][0], timeout_s=20) as client:
        if not rank.rank:
            first = dict(sent[0].payload)
            descriptor = json.loads(base64.b64decode(first["serialized_named_tensors"][0]))
            group, later = descriptor["group"], {**descriptor, "timeout_s": 1000.0}
            changed = [base64.b64encode(json.dumps(later).encode()).decode()]
            stock = update_from_distributed(["a"], ["uint8"], [[8]], group_name=group)
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
        sender.sync(good)
        if not rank.rank:
            client.run(operations.destroy_update_group(group))
    sender.sync(good)
    formed = sender.num_formed("flattened")
    return {"answers": answers, "hashes": sender.hashes(), "num_formed": formed}


def _one_refuses(rank: TrainerRank, good: NamedTensors, targets: Targets) -> dict[str, Any]:
    """The second server has a group of the new one's name already, and refuses to join."""
    sender, seen = Sender(rank, targets), {}
    with mock.patch("secrets.token_hex", return_value="taken"):
        if rank.rank == 0:
            url, tp = targets[1]
            taken = operations.init_update_group(
                master_address="127.0.0.1",
                master_port=free_port(),
                rank_offset=0,
                world_size=tp,
                group_name="weight_sync_taken",
                backend="gloo",
            )
            with SGLangServerClient(url, timeout_s=60) as client:
                client.run(taken)
        seen["refused"] = sender.attempt(good)
    seen["the other alone"] = sender.attempt(good, (0,))
    seen["both again"] = sender.attempt(good)
    return seen | {"hashes": sender.hashes()}


def _one_dies(
    rank: TrainerRank, good: NamedTensors, targets: Targets, pids: list[int]
) -> dict[str, Any]:
    """The second server is killed amid a broadcast, the first one amid sending; returns the errors
    and the seconds.
    """
    sender = Sender(rank, targets, timeout_s=20)
    sender.sync(good)

    def kill(target: int) -> None:
        if rank.rank == 0:
            os.killpg(pids[target], signal.SIGKILL)  # its schedulers might publish without it

    broadcast = sender.attempt(calling_at(good, len(good) // 2, lambda: kill(1)))
    sender.sync(good, members=(0,))  # without the dead one
    sending = Sending(rank, targets[:1], members=(0,))
    assert sending.until_sent()
    return {"broadcast": broadcast, "sending": sending.fail(lambda: kill(0))}


# (the weights' scale, which targets take part): a plan is made, replayed, then shards are sent
SENDS: tuple[tuple[float, tuple[int, ...]], ...] = (
    *((scale, (0,)) for scale in (0.5, 2.0, 4.0, 1.0)),
    *((scale, (1,)) for scale in (0.5, 2.0, 4.0, 1.0)),
    *((scale, BOTH) for scale in (0.5, 2.0, 4.0)),
    *((scale, (1,)) for scale in (0.25, 0.5)),
    *((scale, BOTH) for scale in (2.0, 1.0)),
)


def sent_syncs(
    rank: TrainerRank,
    targets: Targets,
    sends: Sequence[tuple[float, tuple[int, ...]]] = SENDS,
    settings: dict[str, Any] | None = None,
    is_mappable: bool = False,
) -> dict[str, Any]:
    """Go through `sends` with sharded weights; hashes and the report after each sync.

    Args:
        is_mappable: the engines, which are on the same host, can map the shards.
    """
    sender = Sender(rank, targets, **settings or {})
    export = ShardedExport(rank.weights(), is_mappable=is_mappable)
    seen: dict[str, Any] = {"reference": sender.hashes(), "syncs": []}
    for scale, members in sends:
        export.write(rank.weights(scale))
        report = sender.sync(export.reexport(), "compiled", members)
        seen["syncs"].append({"hashes": sender.hashes(), "report": report})
    sender.close()
    return seen


LIMIT_S = 8.0
"""Of the syncs in which somebody fails."""
FAILS_AT = 7


class Sending:
    """Sharded weights that are sent to some targets, as soon as that is proven."""

    def __init__(self, rank: TrainerRank, targets: Targets, members: Sequence[int] = BOTH) -> None:
        self._members = members
        self._rank = rank
        # The sessions say who is missing; the requests to all engines began before, and end alike.
        limits = {"update": 3 * LIMIT_S}
        self._sender = Sender(rank, targets, timeout_s=LIMIT_S, timeouts_s=limits)
        self._export = ShardedExport(rank.weights())
        self._kept: list[Any] = []
        self.hashes = self._sender.hashes

    def until_sent(self) -> int:
        """Sync the weights as they are until shards are sent; the number of buckets that are."""
        for _ in range(4):
            report = self._sender.sync(self._export.reexport(), "compiled", self._members)
            if report["num_sent"]:
                break
        return int(report["num_sent"])

    def fail(self, act: Callable[[], None]) -> dict[str, Any]:
        """A sync of other weights in which something is done before a bucket leaves this rank.

        Its group keeps no engine waiting, even where something on each rank still refers to it.
        """
        calls, launch = itertools.count(), AllToAll.launch

        def launching(sender: AllToAll, *args: Any) -> Any:
            if next(calls) == FAILS_AT:
                self._kept.append(args[-1])  # the group
                act()
            return launch(sender, *args)

        self._export.write(self._rank.weights(0.5))
        with mock.patch.object(AllToAll, "launch", launching):
            seen = self._sender.attempt(self._export.reexport(), self._members, "compiled")
        self._export.write(self._rank.weights())
        return seen


def faults_amid_sending(rank: TrainerRank, targets: Targets, pids: list[int]) -> dict[str, Any]:
    """Faults that all processes survive; how each was told of, and what was served after it."""
    sending = Sending(rank, targets)
    seen: dict[str, Any] = {"reference": sending.hashes()}

    def refuse() -> None:
        if rank.rank == 1:
            raise MemoryError("no room to pack")

    def stop_engine() -> None:
        if rank.rank == 0:
            os.killpg(pids[1], signal.SIGSTOP)

    def stop_trainer() -> None:
        if rank.rank == 1:
            wakes = f"sleep {2 * LIMIT_S + 4}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", wakes])
            os.kill(os.getpid(), signal.SIGSTOP)

    for fault, act in (
        ("cannot pack", refuse),
        ("engine stopped", stop_engine),
        ("trainer rank stopped", stop_trainer),
    ):
        assert sending.until_sent()
        seen[fault] = sending.fail(act)
        if act is stop_engine and rank.rank == 0:
            os.killpg(pids[1], signal.SIGCONT)
        if act is stop_trainer and rank.rank == 0:
            time.sleep(LIMIT_S)  # the other rank is stopped for longer than this one has waited
        seen[fault]["num_sent"] = sending.until_sent()
        seen[fault]["hashes"] = sending.hashes()
    return seen


def dies_as_it_is_read(rank: TrainerRank, targets: Targets) -> dict[str, Any]:
    """Rank 1 is killed while engines read all ranks' shards; how the other one was told, and what
    the engines had before.
    """
    sender = Sender(rank, targets, timeout_s=LIMIT_S)
    export = ShardedExport(rank.weights(), is_mappable=True)
    reports = [sender.sync(export.reexport(), "compiled") for _ in range(3)]
    assert reports[-1]["num_pulled"]
    reference = sender.hashes()

    def die(source: PulledBuckets) -> None:
        if rank.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    export.write(rank.weights(0.5))
    with mock.patch.object(PulledBuckets, "confirm", die):
        return {"reference": reference} | sender.attempt(export.reexport(), BOTH, "compiled")


def dies_amid_sending(rank: TrainerRank, targets: Targets) -> dict[str, Any]:
    """Rank 1 is killed; how the other one was told, and what the engines had before."""
    sending = Sending(rank, targets)
    assert sending.until_sent()
    reference = sending.hashes()

    def die() -> None:
        if rank.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    return {"reference": reference} | sending.fail(die)


def sends_between_hosts(rank: TrainerRank, url: str, address: str) -> list[dict[str, Any]]:
    """Sharded weights go to one engine of TP 2, away and back until they are sent.

    Args:
        rank: on one of two hosts.
        url: of the engine's server.
        address: of the first rank's host.
    """
    sender = Sender(rank, [(url, 2)], address=address)
    export, seen = ShardedExport(rank.weights()), []
    for scale in (1.0, 0.5, 1.0, 0.5, 1.0):
        export.write(rank.weights(scale))
        report = sender.sync(export.reexport(), "compiled", (0,))
        seen.append({"hashes": hashes_of_hosts(rank), "report": report})
    sender.close()
    return seen


def good_sync(rank: TrainerRank, targets: Targets) -> list[Hashes]:
    """The weights as they are, to all targets; what these have then."""
    sender = Sender(rank, targets)
    sender.sync(rank.weights())
    sender.close()
    return sender.hashes()


# (the weights' scale, mode): "compiled" makes its plan in its first sync and replays it after that
ONE_REPLICA: tuple[tuple[float, str], ...] = (
    (0.5, "flattened"),
    (1.0, "flattened"),
    (0.5, "compiled"),
    (2.0, "compiled"),
    (1.0, "compiled"),
)


def syncs_to_one_replica(rank: TrainerRank, url: str) -> dict[str, Any]:
    """Go through `ONE_REPLICA`, then a sync that fails and one that is good again."""
    sender = Sender(rank, [(url, 1)])
    weights = {scale: rank.weights(scale) for scale in (0.5, 1.0, 2.0)}
    seen: dict[str, Any] = {"reference": sender.hashes()[0], "syncs": []}

    def sync(scale: float, mode: str) -> None:
        report = sender.sync(weights[scale], mode, (0,))
        found = {"hashes": sender.hashes()[0], "report": report}
        seen["syncs"].append(found | {"num_formed": sender.num_formed(mode)})

    for scale, mode in ONE_REPLICA:
        sync(scale, mode)
    seen |= sender.attempt(doubled(weights[1.0]), (0,))
    sync(0.5, "flattened")
    sync(1.0, "compiled")
    sender.close()
    return seen


class Sender:
    """The disaggregated transports of one trainer rank, one for each mode."""

    def __init__(
        self,
        rank: TrainerRank,
        targets: Targets,
        timeout_s: float = 60,
        address: str | None = None,
        **settings: Any,
    ) -> None:
        self._address = address
        self._rank = rank
        self._targets = targets
        self._timeout_s = timeout_s
        self._settings = settings
        self._made: dict[str, tuple[Any, Any]] = {}

    def sync(
        self,
        weights: Any,
        mode: str = "flattened",
        members: Sequence[int] = BOTH,
        version: str = "v",
    ) -> dict[str, Any]:
        """Sync to some of the targets; the report."""
        from verl_sglang_sync.engine.update_groups import Replica
        from verl_sglang_sync.report import SyncReport

        transport, _ = self._transport(mode)
        replicas = [
            Replica(identity=url, base_url=url, num_ranks=tp)
            for url, tp in (self._targets[i] for i in members)
        ]
        report = SyncReport(mode=mode, replica=None)
        asyncio.run(transport.sync(weights, version=version, report=report, replicas=replicas))
        return asdict(report)

    def attempt(
        self, weights: Any, members: Sequence[int] = BOTH, mode: str = "flattened"
    ) -> dict[str, Any]:
        """Sync; how it failed, if it did, and the seconds."""
        from verl_sglang_sync import WeightSyncError

        started, error = time.monotonic(), "no error"
        try:
            self.sync(weights, mode, members)
        except WeightSyncError as raised:
            error = str(raised)
        return {"error": error, "seconds": time.monotonic() - started}

    def num_formed(self, mode: str) -> int:
        """How many groups this rank has formed."""
        groups = self._transport(mode)[1]
        return 0 if groups is None else groups.num_formed

    def close(self) -> None:
        """Dissolve the groups."""
        for _, groups in self._made.values():
            if groups is not None:
                groups.close()

    def hashes(self) -> list[Hashes]:
        """By target and TP rank, taken in the engines' processes; empty on other ranks."""
        seen, folder = [], self._rank.folder
        for url, tp in self._targets if self._rank.rank == 0 else ():
            with SGLangServerClient(url, timeout_s=60) as client:
                run_loader(client, tp, HASH_LOADER, str(folder), self._rank.device)
            seen.append(read_hashes(folder, tp))
        return seen

    def _transport(self, mode: str) -> tuple[Any, Any]:
        from verl_sglang_sync.collective import TorchTrainerGroup
        from verl_sglang_sync.engine.update_groups import UpdateGroups
        from verl_sglang_sync.sync.transport import disaggregated_transport

        if mode not in self._made:
            groups = None
            if self._rank.rank == 0:
                groups = UpdateGroups(
                    address=self._address or (loopback() if mode == "compiled" else "127.0.0.1"),
                    device=self._rank.device,
                    timeout_s=self._timeout_s,
                    timeouts_s=self._settings.get("timeouts_s", {}),
                )
            limit_s = self._timeout_s
            transport = disaggregated_transport(
                groups=groups,
                settings=settings_of(mode, request_timeout_s=limit_s, **self._settings),
                group=TorchTrainerGroup(timeout_s=limit_s),
                device=self._rank.device,
            )
            self._made[mode] = transport, groups
        return self._made[mode]
