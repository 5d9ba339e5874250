"""Packs a LoRA adapter that SGLang serves unmerged. Every sync replaces the whole adapter.

The base weights are synced once, as without an adapter. They are synced again if a replica joins
without them, or if a colocated engine publishes another version of them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from verl.workers.rollout.sglang_rollout.utils import SGLANG_LORA_NAME

from verl_sglang_sync.engine.server_client import operations
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sync.adapter_sync import AdapterUpdate
from verl_sglang_sync.verl.adapter_config import (
    EXPORTED,
    config_refusals,
    json_config,
    layer_refusals,
    served_adapter,
    tensor_refusals,
)
from verl_sglang_sync.verl.upstream import tp_ranks_share_adapters

BASE_OF_EMBEDDINGS = ("embed_tokens.base_layer.weight", "lm_head.base_layer.weight")
MAX_NAMED = 5
"""Number of reasons that a message names."""


def collect_adapter(
    weights: Iterable[NamedTensor], peft_config: dict[str, Any], *, num_ranks: int, is_leader: bool
) -> AdapterUpdate:
    """Read verl's export of an adapter, and pack the adapter. Collective over the trainer's ranks.

    Args:
        weights: the adapter's tensors, with PEFT's names.
        peft_config: the adapter's configuration.
        num_ranks: number of TP ranks of the engine.
        is_leader: False if this rank has no engine. Such a rank keeps no tensors.

    Returns:
        The update, with a `refusal` if SGLang cannot serve the adapter as it was trained.
    """
    tensors: dict[str, torch.Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in weights:
        # PEFT exports the base weights of an adapted embedding or head, which the base sync sends.
        if name.endswith(BASE_OF_EMBEDDINGS):
            continue
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        shapes[name] = tuple(full.shape)
        if is_leader:
            tensors[name] = full.detach().cpu()
    refused = config_refusals(peft_config)
    # The tensors of another kind of adapter mean nothing to LoRA's rules.
    refused = refused or tensor_refusals(peft_config, shapes)
    config = json_config(peft_config)
    if tensors and not refused:
        config, tensors = served_adapter(peft_config, tensors)
    # verl 0.9.1's own client fails here: its request has a field that SGLang 0.5.14 does not have.
    load = operations.load_adapter(
        SGLANG_LORA_NAME,
        config,
        pickle.dumps(tensors),
        num_copies=None if tp_ranks_share_adapters() else num_ranks,
    )
    return AdapterUpdate(
        unload=operations.unload_adapter(SGLANG_LORA_NAME),
        load=load,
        num_tensors=len(tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors.values()),
        refusal=refusal_text(refused) if refused else None,
    )


def check_adapter(peft_config: dict[str, Any], model: Any) -> None:
    """Refuse an adapter that SGLang cannot serve, before the base weights are synced.

    Args:
        peft_config: the adapter's configuration.
        model: the trainer's model. Layers are checked if it is PEFT's.

    Raises:
        ValueError: the configuration has fields that SGLang ignores, another adapter is active, or
            a layer computes with another scale, or without the adapter.
    """
    refused = config_refusals(peft_config)
    active_adapters = getattr(model, "active_adapters", ())
    if unexported := [name for name in active_adapters if name != EXPORTED]:
        refused.append(f"the adapters {unexported} are active beside, or in place of, {EXPORTED!r}")
    # The layers of another kind of adapter, or of Megatron, have no such scales.
    elif not refused and isinstance(model, nn.Module):
        refused = layer_refusals(peft_config, model)
    if refused:
        raise ValueError(refusal_text(refused))


def refusal_text(refused: list[str]) -> str:
    """Return the message for a refused adapter, with the first reasons."""
    lines = [f"\n  - {reason}" for reason in refused[:MAX_NAMED]]
    if len(refused) > MAX_NAMED:
        lines.append(f"\n  - and {len(refused) - MAX_NAMED} more")
    return (
        f"weight sync: SGLang cannot serve this LoRA adapter as it was trained:{''.join(lines)}\n"
        "Nothing of it was published. Train without these, or, for LoRA and DoRA, set "
        "actor_rollout_ref.model.lora.merge=True."
    )
