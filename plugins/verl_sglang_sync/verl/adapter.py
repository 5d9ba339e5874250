"""Packs a LoRA adapter that SGLang serves unmerged: every sync replaces all of it.

The base weights are synced once, as without an adapter; in disaggregated mode again if a replica
joins that does not have them. verl 0.9.1's own client fails with the first adapter: its request has
a field that SGLang 0.5.14 does not have.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from verl.workers.rollout.sglang_rollout.utils import SGLANG_LORA_NAME

from verl_sglang_sync.engine.server_client import operations
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sync.adapter_sync import AdapterUpdate
from verl_sglang_sync.verl.adapter_config import (
    config_refusals,
    json_config,
    served_adapter,
    tensor_refusals,
)
from verl_sglang_sync.verl.upstream import tp_ranks_share_adapters

BASE_OF_EMBEDDINGS = ("embed_tokens.base_layer.weight", "lm_head.base_layer.weight")
MOST_NAMED = 5
"""Reasons that a message has."""


def collect_adapter(
    weights: Iterable[NamedTensor], peft_config: dict[str, Any], *, num_ranks: int, is_leader: bool
) -> AdapterUpdate:
    """Read verl's export of an adapter, with PEFT's names; collective over the trainer's ranks.

    Args:
        num_ranks: number of TP ranks of the engine.
        is_leader: False: this rank has no engine, and keeps no tensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in weights:
        # PEFT has the base weights of an adapted embedding or head, which the base sync brings.
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


def check_adapter(peft_config: dict[str, Any], active_adapters: Iterable[str]) -> None:
    """Raise ValueError, before the base weights are synced, for an adapter that would be refused.

    Args:
        active_adapters: of the trainer's model; verl exports the one that is named "default".
    """
    refused = config_refusals(peft_config)
    if others := [name for name in active_adapters if name != "default"]:
        refused.append(f"the adapters {others} are active beside, or in place of, 'default'")
    if refused:
        raise ValueError(refusal_text(refused))


def refusal_text(refused: list[str]) -> str:
    named = "; ".join(refused[:MOST_NAMED])
    more = f"; and {len(refused) - MOST_NAMED} more" if len(refused) > MOST_NAMED else ""
    return (
        f"weight sync: SGLang cannot serve this LoRA adapter as it was trained: {named}{more}. "
        "Nothing of it was published. Train without these, or, for LoRA and DoRA, set "
        "actor_rollout_ref.model.lora.merge=True."
    )
