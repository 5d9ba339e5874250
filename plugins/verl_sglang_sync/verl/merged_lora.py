"""Exports an FSDP2 model with its LoRA adapters merged, and leaves the model as it is.

verl's own export of merged adapters loads the model onto the GPU, copies the base weights to the
host, merges into the live parameters, and restores them. Here PEFT merges into gathered copies of
one layer after the other, wherever the model's own parameters are:

    export = merged_export(engine)  # None: verl's own export has to do
    for name, tensor in export(): ...       # collective over all ranks
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import normalize_peft_param_name
from verl.utils.model import convert_weight_keys

from verl_sglang_sync.report import warn_once
from verl_sglang_sync.sources.export import NamedTensor

KNOWN = {
    name.format(layer)
    for layer in ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d")
    for name in ("peft.tuners.lora.layer.{}", "peft.tuners.lora.variants.Dora{}Variant")
}
"""Classes of layers, and of variants of LoRA, whose merge changes the layer's own weight and bias
alone; by name, since not every release of PEFT has them all.
"""

Layers = dict[str, tuple[Any, dict[str, str]]]
"""By key of the model's state: the LoRA layer that it is of, and the key of each of its parameters,
by their names in the layer."""


def merged_export(engine: Any) -> Callable[[], Iterator[NamedTensor]] | None:
    """What makes the export of an engine of verl's that merges adapters; None where verl does."""
    module = engine.module
    merges = isinstance(module, FSDPModule) and engine.model_config.lora.get("merge")
    if not merges:
        return None
    keys_of = defaultdict(list)
    for key, tensor in module.state_dict(keep_vars=True).items():
        keys_of[id(tensor)].append(key)
    found: dict[str, Any] = {n: m for n, m in module.named_modules() if isinstance(m, LoraLayer)}
    layers: Layers = {}
    for name, layer in found.items():
        keys = {own: keys_of[id(parameter)] for own, parameter in layer.named_parameters()}
        if (reason := _unknown(layer, keys)) is not None:
            warn_once(
                "weight sync: verl's own export merges the LoRA adapters, slower than layer by "
                f"layer: {name} {reason}"
            )
            return None
        key_of = {own: key for own, [key] in keys.items()}
        layers |= dict.fromkeys(key_of.values(), (layer, key_of))
    return partial(_export, module, layers)


def _unknown(layer: Any, keys: Mapping[str, list[str]]) -> str | None:
    """Why a merge may do more than change the layer's own weight and bias; None: it does not.

    Args:
        keys: all of each parameter in the model's state.
    """
    classes = _class(layer), *map(type, getattr(layer, "lora_variant", {}).values())
    others = {f"{each.__module__}.{each.__qualname__}" for each in classes} - KNOWN
    if others:
        return f"is a {' and a '.join(sorted(others))}"
    if layer.merged:
        return "is merged already"
    if any(len(found) != 1 for found in keys.values()):
        return "has parameters that the model's state lacks, or has twice"
    return None


def _class(layer: Any) -> type:
    """The layer's class, without the one that FSDP2 derives from it where it shards the layer."""
    return type(layer).__bases__[-1] if isinstance(layer, FSDPModule) else type(layer)


def _export(module: nn.Module, layers: Layers) -> Iterator[NamedTensor]:
    """As verl's own: the same names in the same order, whole, those of shards in bfloat16."""
    device = get_device_id()
    state = module.state_dict()
    names = convert_weight_keys(normalize_peft_param_name({key: key for key in state}), module)
    merged: dict[str, Any] = {}  # of one layer
    for name, key in names.items():
        if key not in layers:
            merged[key] = _gathered(state[key], device)
        elif key not in merged:
            merged = _merged(*layers[key], state, device)
        dtype = torch.bfloat16 if isinstance(state[key], DTensor) else None
        yield name, merged.pop(key).to(dtype=dtype)


def _gathered(tensor: Any, device: Any) -> Any:
    """The whole of a tensor of the state; of a `DTensor` it may be the parameter's own memory."""
    if isinstance(tensor, DTensor):
        return tensor.to(device, non_blocking=True).full_tensor()  # type: ignore[attr-defined]
    return tensor.to(device, copy=True)


@torch.no_grad()
def _merged(
    layer: Any, keys: Mapping[str, str], state: Mapping[str, Any], device: Any
) -> dict[str, Any]:
    """Copies of a layer's parameters, PEFT having merged into them, by key of the state."""
    tensors = {f"layer.{own}": _gathered(state[key], device).clone() for own, key in keys.items()}
    torch.func.functional_call(_Merge(layer), tensors, ())
    return {key: tensors[f"layer.{own}"] for own, key in keys.items()}


class _Merge(nn.Module):
    """Merges when called: a twin of the layer, of the same submodules, but with its own records."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer: Any = object.__new__(_class(layer))
        self.layer.__dict__.update(vars(layer), merged_adapters=[], _caches={})

    def forward(self) -> None:
        self.layer.merge()
