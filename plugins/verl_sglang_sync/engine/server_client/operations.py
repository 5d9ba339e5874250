"""The server's operations and their requests, which `client` sends."""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

from verl_sglang_sync.http_settings import Limit


@dataclass(frozen=True)
class Operation:
    """One endpoint.

    Attributes:
        path: without the leading slash.
        limit: which of the user's `timeouts_s` applies.
        idempotent: it may be executed twice.
        admin: SGLang needs the admin key, if one is set.
        confirmed: it has succeeded only if the reply has `"success": true`.
    """

    path: str
    method: Literal["GET", "POST", "DELETE"] = "POST"
    _: KW_ONLY
    limit: Limit
    idempotent: bool
    admin: bool = True
    confirmed: bool = False


# Releasing and resuming by tag are idempotent through our hooks in the engine.
RELEASE = Operation("release_memory_occupation", limit="release", idempotent=True)
RESUME = Operation("resume_memory_occupation", limit="resume", idempotent=True)
UPDATE = Operation("update_weights_from_tensor", limit="update", idempotent=False, confirmed=True)
INIT_GROUP = Operation("init_weights_update_group", limit="group", idempotent=False, confirmed=True)
DESTROY_GROUP = replace(INIT_GROUP, path="destroy_weights_update_group")
LOAD_ADAPTER = Operation(
    "load_lora_adapter_from_tensors", limit="update", idempotent=False, admin=False, confirmed=True
)
UNLOAD_ADAPTER = replace(LOAD_ADAPTER, path="unload_lora_adapter", admin=True)
MODEL_INFO = Operation("model_info", "GET", limit="info", idempotent=True, admin=False)
PROVE = Operation("weight_sync/prove", limit="info", idempotent=True)
PROOF = replace(MODEL_INFO, path="weight_sync/proof")


@dataclass(frozen=True)
class Call:
    """One operation with its arguments. `sent` is set when the request has left."""

    operation: Operation
    payload: Mapping[str, Any] | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    sent: threading.Event | None = field(default=None, compare=False)


def release_memory(tags: Sequence[str]) -> Call:
    """Free the engine's memory of `tags` ("kv_cache", "weights", "cuda_graph")."""
    return Call(RELEASE, {"tags": list(tags)})


def resume_memory(tags: Sequence[str]) -> Call:
    """Map the engine's memory of `tags` again.

    Weights come back as the host backup has saved them. Other weights have undefined content.
    """
    return Call(RESUME, {"tags": list(tags)})


def update_weights(
    handles: Sequence[bytes],
    *,
    load_format: str,
    flush_cache: bool = False,
    weight_version: str | None = None,
    sent: threading.Event | None = None,
) -> Call:
    """Update the weights, for example by one session.

    Args:
        handles: one entry per TP rank, such as a session's descriptors.
        load_format: names the loader in the engine.
        flush_cache: drop the prefix cache, which fails while requests run.
        weight_version: reported by `/model_info` from then on. None leaves it as it is.
        sent: see `Call`.
    """
    payload = {
        "serialized_named_tensors": [base64.b64encode(item).decode() for item in handles],
        "load_format": load_format,
        "flush_cache": flush_cache,
        "weight_version": weight_version,
    }
    return Call(UPDATE, payload, sent=sent)


def init_update_group(
    *,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: str,
) -> Call:
    """Add the engine's TP ranks to a process group. The reply comes when all have joined."""
    return Call(INIT_GROUP, locals())  # SGLang names its fields as the arguments above


def destroy_update_group(group_name: str) -> Call:
    return Call(DESTROY_GROUP, {"group_name": group_name})


def load_adapter(
    name: str, config: Mapping[str, Any], tensors: bytes, *, num_copies: int | None
) -> Call:
    """Serve a LoRA adapter. SGLang refuses a name that it serves already.

    Args:
        config: PEFT's `adapter_config.json`.
        tensors: pickled tensors by name, all of which every TP rank reads.
        num_copies: send a copy for each TP rank. None: they share one (SGLang 0.5.14).
    """
    text = base64.b64encode(tensors).decode()
    copies: dict[str, Any] = (
        {"serialized_tensors": text}
        if num_copies is None
        else {"serialized_named_tensors": [text] * num_copies}
    )
    return Call(LOAD_ADAPTER, {"lora_name": name, "config_dict": dict(config), **copies})


def unload_adapter(name: str) -> Call:
    """Stop serving an adapter when the requests that use it have ended."""
    return Call(UNLOAD_ADAPTER, {"lora_name": name})


def model_info() -> Call:
    """Request the model, and the version of its weights as `weight_version`."""
    return Call(MODEL_INFO)


def ask_for_proof() -> Call:
    """Request a proof of the next sync. The reply is that of `last_proof`."""
    return Call(PROVE)


def last_proof() -> Call:
    """Request the outcome of the last proof, its number, and whether a proof is asked for."""
    return Call(PROOF)
