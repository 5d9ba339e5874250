"""Packs a LoRA adapter that SGLang serves unmerged: every sync replaces all of it.

The base weights are synced once, as without an adapter; in disaggregated mode again if a replica
joins that does not have them. verl 0.9.1's own client fails with the first adapter: its request has
a field that SGLang 0.5.14 does not have.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

from torch.distributed.tensor import DTensor
from verl.workers.rollout.sglang_rollout.utils import (
    SGLANG_LORA_NAME,
    normalize_peft_config_for_sglang,
)

from verl_sglang_sync.engine.server_client import operations
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sync.adapter_sync import AdapterUpdate
from verl_sglang_sync.verl.upstream import tp_ranks_share_adapters


def collect_adapter(
    weights: Iterable[NamedTensor], peft_config: dict[str, Any], *, num_ranks: int, is_leader: bool
) -> AdapterUpdate:
    """Read verl's export of an adapter, with PEFT's names; collective over the trainer's ranks.

    Args:
        num_ranks: number of TP ranks of the engine.
        is_leader: False: this rank has no engine, and keeps no tensors.
    """
    full = (
        (name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        for name, tensor in weights
    )
    tensors = {name: tensor.detach().cpu() for name, tensor in full if is_leader}
    load = operations.load_adapter(
        SGLANG_LORA_NAME,
        normalize_peft_config_for_sglang(peft_config),
        pickle.dumps(tensors),
        num_copies=None if tp_ranks_share_adapters() else num_ranks,
    )
    return AdapterUpdate(
        unload=operations.unload_adapter(SGLANG_LORA_NAME),
        load=load,
        num_tensors=len(tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors.values()),
    )
