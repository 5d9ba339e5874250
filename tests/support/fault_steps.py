"""What goes wrong between trainer and server, done to real trainer ranks and a real engine."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

from support.engine_loaders import COUNT_LOADER
from support.exports import calling_at
from support.fault_proxy import Fault, plan, seen
from support.trainer import TrainerRank, ask_engine, sync_error
from verl_sglang_sync.engine.server_client import operations

UPDATE_TIMEOUT_S = 3.0
KEYS = {"api_key": "normal", "admin_api_key": "admin"}
MODES = ("flattened", "compiled")  # "bucketed" differs from the first by one buffer
SLOW_S = 1.5
DIES_AFTER = 6


def use_client(rank: TrainerRank, url: str, **access: Any) -> None:
    limits = {"update": UPDATE_TIMEOUT_S}
    rank.use_client(url, timeout_s=60, timeouts_s=limits, **{**KEYS, **access})


def num_loads(rank: TrainerRank, *, slow_nth: int = 0, slow_s: float = 0.0) -> list[int]:
    """How many sessions each TP rank has loaded since the last call."""
    order = {"folder": str(rank.folder), "nth": slow_nth, "seconds": slow_s}
    ask_engine(rank, COUNT_LOADER, json.dumps(order))
    if not rank.is_leader:
        return []
    return [json.loads((rank.folder / f"loads{tp}.json").read_text()) for tp in range(rank.tp)]


def sync(rank: TrainerRank, mode: str, weights: Any, version: str = "good") -> dict[str, Any]:
    """One sync and the stage after it: how it failed, if it did, and how long both took."""
    # A fault strikes the n-th request: no other kind may come before.
    manager = rank.manager(mode, bucket_bytes=128 << 10, manifest_check="off")
    started, resume, synced_s = time.monotonic(), manager.resume, 0.0

    async def timed_resume(tags: tuple[str, ...]) -> None:
        nonlocal synced_s
        synced_s = time.monotonic() - started
        await resume(tags)

    manager.resume = timed_resume
    error = sync_error(manager, weights, version)
    return {"error": error, "seconds": time.monotonic() - started, "synced_s": synced_s}


def faults_of_a_request(rank: TrainerRank, url: str) -> dict[str, Any]:
    """A fault in each sync of each mode, alternately with other weights; then a good sync."""
    use_client(rank, url)
    weights = {s: rank.weights(s) for s in (1.0, 0.5)}
    scale = 0.5
    result: dict[str, Any] = {"reference": rank.hashes(), "faults": []}
    num_loads(rank)
    sync(rank, "flattened", weights[0.5])
    result["half"] = rank.hashes()
    for mode in MODES:
        for fault in (
            Fault("lose", 1),
            Fault("hold", 1, UPDATE_TIMEOUT_S + 2),
            Fault("cut", 1, SLOW_S / 3),
            Fault("twice", 1),
        ):
            scale = 1.5 - scale
            num_loads(rank, slow_nth=1 if fault.kind == "cut" else 0, slow_s=SLOW_S)
            if rank.is_leader:
                plan(url, fault)
            found: dict[str, Any] = sync(rank, mode, weights[scale], f"{mode}, {fault.kind}")
            found |= {"mode": mode, "kind": fault.kind, "scale": scale}
            if rank.is_leader:
                found["requests"] = seen(url)
                found["version"] = rank.client.run(operations.model_info())["weight_version"]
            found["loads"] = num_loads(rank)
            found["hashes"] = rank.hashes()
            found["good"] = sync(rank, mode, weights[scale])["error"]
            found["good_hashes"] = rank.hashes()
            result["faults"].append(found)
    return result


def faults_that_fail(rank: TrainerRank, url: str, closed_url: str) -> dict[str, Any]:
    """A refused connection and a wrong key, in each mode; then a good sync."""
    weights, result = rank.weights(), {}
    use_client(rank, url)
    sync(rank, "flattened", weights)  # the first one imports sglang
    for name, bad_url, access in (
        ("refused", closed_url, {}),
        ("wrong key", url, {"admin_api_key": "wrong"}),
    ):
        for mode in MODES:
            use_client(rank, bad_url, **access)
            failed = sync(rank, mode, weights)
            use_client(rank, url)
            good = sync(rank, mode, weights)["error"]
            hashes = rank.hashes()
            result[f"{name}, {mode}"] = {"failed": failed, "good": good, "hashes": hashes}
    return result


def kill_between_buckets(rank: TrainerRank, url: str, process_group: int) -> Any:
    """The server's processes are killed while the leader exports its third bucket."""
    use_client(rank, url)
    weights = rank.weights()
    sync(rank, "flattened", weights)  # the first one imports sglang

    def kill() -> None:
        if rank.is_leader:
            os.killpg(process_group, signal.SIGKILL)

    return sync(rank, "bucketed", calling_at(weights, DIES_AFTER, kill))
