"""Keeps the parameters that verl's FSDP engine offloads in host memory that engines can map.

verl moves an offloaded model to the host by one function, and torch copies each parameter to new
memory. That function is wrapped: for a model that is exported, the copies get the memory of
`sources.host_memory`. All else stays verl's and torch's own. A model is known here from its first
export on, so that reference models and critics stay as they are.

verl's export does not load the model: FSDP2's gathers one parameter after the other, and FSDP1's is
made without a call of verl's method (`exports`). So a sync without an export loads nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from verl_sglang_sync.sources.host_memory import HOST_MEMORY

_OFFLOAD = "offload_fsdp_model_to_cpu"
_exported: WeakSet[nn.Module] = WeakSet()
_is_placing = False  # the function is wrapped


def place_offloaded_parameters(device: torch.device) -> None:
    """Make verl's FSDP engines in this process offload exported models to mappable memory.

    Args:
        device: of the parameters while they are not offloaded.
    """
    # The engine's module has the function under its own name, for all of its calls.
    from verl.workers.engine.fsdp import transformer_impl

    global _is_placing
    if _is_placing:
        return
    offload = getattr(transformer_impl, _OFFLOAD)

    @functools.wraps(offload)
    def placed(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        if model not in _exported:
            offload(model, *args, **kwargs)
            return
        with HOST_MEMORY.placing(_tensors(model), device):
            offload(model, *args, **kwargs)

    setattr(transformer_impl, _OFFLOAD, placed)
    _is_placing = True


def is_offloaded(engine: Any) -> bool:
    """Return True if verl offloads an FSDP engine's parameters between its steps."""
    # Not with `offload_policy`: torch itself moves such parameters, and verl never does.
    return bool(engine._is_offload_param)


def prepare_export(engine: Any) -> None:
    """Place the parameters of an engine that is exported, if they are on the host elsewhere.

    From then on every offload places them.
    """
    from verl.workers.engine.fsdp import transformer_impl

    if not _is_placing or not is_offloaded(engine):
        return
    _exported.add(engine.module)
    if any(_is_elsewhere(tensor) for tensor in _tensors(engine.module)):
        # verl has offloaded them before the first export, or has loaded a checkpoint.
        getattr(transformer_impl, _OFFLOAD)(engine.module)


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _is_elsewhere(tensor: torch.Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    is_on_host = local.device.type == "cpu" and local.numel() > 0
    return is_on_host and HOST_MEMORY.file_of(local.data_ptr()) is None
