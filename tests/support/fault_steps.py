"""What goes wrong between trainer and server, done to real trainer ranks and a real engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from support.engine_steps import weights_of
from support.fault_proxy import Fault, as_json, plan, seen
from support.load_counter import COUNT_LOADER
from support.trainer import NamedTensors, TrainerRank, engine_hashes
from verl_sglang_sync.engine.server_client import operations

UPDATE_TIMEOUT_S = 3.0
KEYS = {"api_key": "normal", "admin_api_key": "admin"}
MODES = ("flattened", "compiled")  # "bucketed" differs from the first by one buffer
BUCKET_BYTES = 128 << 10
SLOW_S = 1.5
DIES_AFTER = 6


def use_client(rank: TrainerRank, url: str, **access: Any) -> None:
    """Have the rank talk to `url` from now on."""
    from verl_sglang_sync.engine.server_client import SGLangServerClient

    rank.client = SGLangServerClient(
        url,
        timeout_s=60,
        timeouts_s={"update": UPDATE_TIMEOUT_S},
        **{**KEYS, **access},
        rank=rank.rank,
        replica=rank.replica,
    )


def _call_loader(rank: TrainerRank, loader: str, argument: dict[str, Any]) -> None:
    from support.ipc import serialize_handles

    if rank.is_leader:
        tensors = [torch.zeros(1) for _ in range(rank.tp)]
        handles = [serialize_handles([(json.dumps(argument), tensor)]) for tensor in tensors]
        rank.client.run(operations.update_weights(handles, load_format=loader))


def num_loads(
    rank: TrainerRank, folder: Path, *, slow_nth: int = 0, slow_s: float = 0.0
) -> list[int]:
    """How many sessions each TP rank has loaded since the last call."""
    _call_loader(rank, COUNT_LOADER, {"folder": str(folder), "nth": slow_nth, "seconds": slow_s})
    if not rank.is_leader:
        return []
    return [json.loads((folder / f"loads{tp}.json").read_text()) for tp in range(rank.tp)]


def sync(
    rank: TrainerRank, mode: str, weights: NamedTensors, version: str = "good"
) -> dict[str, Any]:
    """One sync and the stage after it: what was sent or how it failed, and how long it took."""
    from verl_sglang_sync import WeightSyncError

    # A fault strikes the n-th request: no other kind may come before.
    manager = rank.manager(mode, bucket_bytes=BUCKET_BYTES, manifest_check="off")
    error, synced_s, started = None, 0.0, time.monotonic()
    try:
        asyncio.run(manager.sync(iter(weights), version=version))
        synced_s = time.monotonic() - started
        asyncio.run(manager.resume(("kv_cache",)))  # it is resident
    except WeightSyncError as failure:
        error = str(failure)
    return {
        "error": error,
        "seconds": time.monotonic() - started,
        "synced_s": synced_s,
    }


def faults_of_a_request(rank: TrainerRank, url: str, model: str, folder: str) -> dict[str, Any]:
    """A fault in each sync of each mode, alternately with other weights; then a good sync."""
    use_client(rank, url)
    weights = {s: weights_of(Path(model), rank.device, scale=s) for s in (1.0, 0.5)}
    where = Path(folder)
    result: dict[str, Any] = {"reference": engine_hashes(rank, where), "faults": []}
    num_loads(rank, where)
    sync(rank, "flattened", weights[0.5])
    result["half"] = engine_hashes(rank, where)
    scale = 0.5
    for mode in MODES:
        for fault in (
            Fault("lose", 1),
            Fault("hold", 1, UPDATE_TIMEOUT_S + 2),
            Fault("cut", 1, SLOW_S / 3),
            Fault("twice", 1),
        ):
            scale = 1.5 - scale
            num_loads(rank, where, slow_nth=1 if fault.kind == "cut" else 0, slow_s=SLOW_S)
            if rank.is_leader:
                plan(url, fault)
            outcome = sync(rank, mode, weights[scale], f"{mode}, {fault.kind}")
            found: dict[str, Any] = {**outcome, "mode": mode, "kind": fault.kind, "scale": scale}
            if rank.is_leader:
                found["requests"] = as_json(seen(url))
                found["version"] = rank.client.run(operations.model_info())["weight_version"]
            found["loads"] = num_loads(rank, where)
            found["hashes"] = engine_hashes(rank, where)
            found["good"] = sync(rank, mode, weights[scale])
            found["good_hashes"] = engine_hashes(rank, where)
            result["faults"].append(found)
    return result


def faults_that_fail(
    rank: TrainerRank, url: str, closed_url: str, model: str, folder: str
) -> dict[str, Any]:
    """A refused connection and a wrong key, in each mode; then a good sync."""
    weights, result = weights_of(Path(model), rank.device), {}
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
            good = sync(rank, mode, weights)
            hashes = engine_hashes(rank, Path(folder))
            result[f"{name}, {mode}"] = {"failed": failed, "good": good, "hashes": hashes}
    return result


def kill_between_buckets(rank: TrainerRank, url: str, model: str, process_group: int) -> Any:
    """The server's processes are killed while the leader exports its third bucket."""
    use_client(rank, url)
    sync(rank, "flattened", weights_of(Path(model), rank.device))  # the first one imports sglang

    def export(weights: NamedTensors) -> Iterator[Any]:
        for i, pair in enumerate(weights):
            if i == DIES_AFTER and rank.is_leader:
                os.killpg(process_group, signal.SIGKILL)
            yield pair

    weights = weights_of(Path(model), rank.device)
    return sync(rank, "bucketed", export(weights))  # type: ignore[arg-type]
