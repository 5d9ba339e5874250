"""The table of operations, and the requests that they become. Pure: nothing is sent here."""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from sglang_loader.manifest_verdict import MANIFEST_CHECK
from sglang_loader.update_keys import UpdateKey

Limit = Literal["update", "release", "resume", "group", "info"]
LIMITS: tuple[str, ...] = get_args(Limit)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One endpoint.

    Attributes:
        path: without the leading slash.
        method: HTTP method.
        idempotent: it may be sent again although it may have been executed.
        limit: which timeout holds.
        admin: SGLang wants the admin key, if one is set.
        confirmed: it has succeeded only if the reply says `"success": true`.
    """

    path: str
    method: Literal["GET", "POST", "DELETE"] = "POST"
    idempotent: bool
    limit: Limit
    admin: bool = True
    confirmed: bool = False


# Releasing and resuming by tag are idempotent through our hooks in the engine.
RELEASE = Operation(path="release_memory_occupation", idempotent=True, limit="release")
RESUME = Operation(path="resume_memory_occupation", idempotent=True, limit="resume")
UPDATE = Operation(
    path="update_weights_from_tensor", idempotent=False, limit="update", confirmed=True
)
# The same endpoint, which applies nothing then.
CHECK = Operation(
    path="update_weights_from_tensor", idempotent=True, limit="update", confirmed=True
)
UPDATE_DISTRIBUTED = Operation(
    path="update_weights_from_distributed", idempotent=False, limit="update", confirmed=True
)
INIT_GROUP = Operation(
    path="init_weights_update_group", idempotent=False, limit="group", confirmed=True
)
DESTROY_GROUP = Operation(
    path="destroy_weights_update_group", idempotent=False, limit="group", confirmed=True
)
FLUSH_CACHE = Operation(path="flush_cache", idempotent=True, limit="info")
PAUSE = Operation(path="pause_generation", idempotent=True, limit="info")
CONTINUE = Operation(path="continue_generation", idempotent=True, limit="info")
SERVER_INFO = Operation(
    path="server_info", method="GET", idempotent=True, limit="info", admin=False
)
MODEL_INFO = Operation(path="model_info", method="GET", idempotent=True, limit="info", admin=False)
HEALTH = Operation(path="health", method="GET", idempotent=True, limit="info", admin=False)
OPERATIONS = (
    *(RELEASE, RESUME, UPDATE, CHECK, UPDATE_DISTRIBUTED, INIT_GROUP, DESTROY_GROUP),
    *(FLUSH_CACHE, PAUSE, CONTINUE, SERVER_INFO, MODEL_INFO, HEALTH),
)


@dataclass(frozen=True)
class Call:
    """One operation with its arguments, as it goes out; `sent` is set once it has."""

    operation: Operation
    payload: Mapping[str, Any] | None = None
    key: UpdateKey | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    sent: threading.Event | None = field(default=None, compare=False)


def release_memory(tags: Sequence[str]) -> Call:
    """Free the engine's memory of `tags` ("kv_cache", "weights", "cuda_graph")."""
    return Call(RELEASE, {"tags": list(tags)})


def resume_memory(tags: Sequence[str]) -> Call:
    """Map the engine's memory of `tags` again; weights come back with undefined content."""
    return Call(RESUME, {"tags": list(tags)})


def update_weights(
    handles: Sequence[bytes],
    *,
    load_format: str,
    flush_cache: bool = False,
    weight_version: str | None = None,
    key: UpdateKey | None = None,
) -> Call:
    """Load one bucket, or a session's; with the last, drop the prefix cache, publish the version.

    Args:
        handles: one entry per TP rank, made by `sglang_loader.ipc.serialize_handles`, or
            a session's descriptors.
        load_format: names the loader in the engine.
        flush_cache: drop the prefix cache; fails where requests run.
        weight_version: what `/model_info` reports from then on; None leaves it as it is.
        key: makes a repetition harmless; without one the request is never repeated.
    """
    payload = {
        "serialized_named_tensors": [base64.b64encode(item).decode() for item in handles],
        "load_format": load_format,
        "flush_cache": flush_cache,
        "weight_version": weight_version,
    }
    return Call(UPDATE, payload, key)


def check_manifest(encoded: bytes) -> Call:
    """Ask whether the tensors of a manifest fit the engine's model; nothing is loaded.

    Args:
        encoded: by `sglang_loader.weight_manifest.encode_manifest`.
    """
    payload = {
        "serialized_named_tensors": [base64.b64encode(encoded).decode()],
        "load_format": MANIFEST_CHECK,
        "flush_cache": False,
    }
    return Call(CHECK, payload)


def update_from_distributed(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    *,
    group_name: str,
    load_format: str | None = None,
    flush_cache: bool = False,
    weight_version: str | None = None,
    key: UpdateKey | None = None,
) -> Call:
    """Load one bucket that the trainer broadcasts in `group_name`; else as `update_weights`."""
    payload = {
        "names": list(names),
        "dtypes": list(dtypes),
        "shapes": [list(shape) for shape in shapes],
        "group_name": group_name,
        "load_format": load_format,
        "flush_cache": flush_cache,
        "weight_version": weight_version,
    }
    return Call(UPDATE_DISTRIBUTED, payload, key)


def init_update_group(
    *,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: str,
) -> Call:
    """Have the engine's TP ranks join a process group with the trainer; returns when all have."""
    payload = {
        "master_address": master_address,
        "master_port": master_port,
        "rank_offset": rank_offset,
        "world_size": world_size,
        "group_name": group_name,
        "backend": backend,
    }
    return Call(INIT_GROUP, payload)


def destroy_update_group(group_name: str) -> Call:
    """Have the engine leave a process group."""
    return Call(DESTROY_GROUP, {"group_name": group_name})


def flush_cache() -> Call:
    """Drop the prefix cache; fails while requests run."""
    return Call(FLUSH_CACHE)


def pause_generation(mode: str) -> Call:
    """Pause generation; `mode`: "abort", "retract" or "in_place"."""
    return Call(PAUSE, {"mode": mode})


def continue_generation() -> Call:
    """End a pause."""
    return Call(CONTINUE, {})


def server_info() -> Call:
    """The server's arguments and state."""
    return Call(SERVER_INFO)


def model_info() -> Call:
    """The model, and the version of its weights as `weight_version`."""
    return Call(MODEL_INFO)


def health() -> Call:
    """Succeeds if the server is up."""
    return Call(HEALTH)
