"""Exports an FSDP2 model with its LoRA adapters merged, and leaves the model as it is.

    export = merged_export(engine)  # None if verl merges nothing, or if verl makes the export
    for name, tensor in export(): ...       # collective over all ranks

verl's own export of merged adapters loads the model onto the GPU, copies the base weights to the
host, merges into the live parameters, and restores them. Here PEFT merges into gathered copies of
one layer after the other. The model's own parameters may be on the GPU or offloaded.

verl's own export merges only `LoraLayer`s, and none in FSDP2's root unit. Engines would then serve
base weights in place of the policy. So an adapter is refused by name, before anything is exported,
unless its merge is known to be right. This holds for FSDP1, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from peft import LoraModel, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import normalize_peft_param_name
from verl.utils.model import convert_weight_keys

from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.verl.checkpoint_format import in_checkpoint_format

KNOWN = {
    name.format(layer)
    for layer in ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d")
    for name in ("peft.tuners.lora.layer.{}", "peft.tuners.lora.variants.Dora{}Variant")
}
"""The names of classes of LoRA layers and variants whose merge changes only the layer's own weight
and bias. Names, because not every release of PEFT has all classes."""
FUSED_EXPERTS = {"peft.tuners.lora.layer.ParamWrapper"}
"""The names of further such classes, only with FSDP2. PEFT wraps a module of fused experts once
for each of the module's parameters."""

Layers = dict[str, tuple[Any, dict[str, str]]]
"""The LoRA layer of each key of the model's state, and the keys of all parameters of this layer, by
the parameters' names in the layer."""


class AdapterNotMergeable(ValueError):
    """An adapter whose merged weights would differ from the trained model."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"weight sync: the adapter cannot be merged for the rollout: {reason}. Nothing was "
            "exported. Train LoRA or DoRA on linear layers, embeddings, convolutions or, with "
            "FSDP2, fused experts, without `modules_to_save` and `trainable_token_indices`."
        )


def merged_export(engine: Any) -> Callable[[], Iterator[NamedTensor]] | None:
    """Make the export of a verl engine that merges adapters under FSDP2.

    Returns:
        A function that makes the export, or None if verl makes it: the engine merges no adapters,
        or the model is FSDP1's.

    Raises:
        AdapterNotMergeable: the merged weights would be wrong.
    """
    module = engine.module
    if not engine.model_config.lora.get("merge"):
        return None
    is_fsdp2 = isinstance(module, FSDPModule)
    model = getattr(module, "_fsdp_wrapped_module", module)
    adapted = {n: m for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
    _check_model(model)
    for name, layer in adapted.items():
        _check_layer(name, layer, KNOWN | FUSED_EXPERTS if is_fsdp2 else KNOWN)
    return partial(_export, model, _layers(model, adapted)) if is_fsdp2 else None


def _check_model(model: Any) -> None:
    """Raise AdapterNotMergeable if the model has trained parameters outside of the LoRA layers."""
    kind = _class(model.base_model if isinstance(model, PeftModel) else model)
    if kind is not LoraModel:
        raise AdapterNotMergeable(f"the model is a {_name(kind)}, not a {_name(LoraModel)}")
    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise AdapterNotMergeable(f"{name} is a {_name(_class(module))}")
    # A merge into a tied weight changes the other embeddings, too.
    base = model.base_model.model
    if not _ties_embeddings(base.config):
        return
    for embeddings in (base.get_input_embeddings(), base.get_output_embeddings()):
        if embeddings is not None and any(
            isinstance(module, BaseTunerLayer) for module in embeddings.modules()
        ):
            raise AdapterNotMergeable(
                "the input and output embeddings are tied, and the adapter changes one of them: "
                "merged into the shared weight it would change the other, too"
            )


def _ties_embeddings(config: Any) -> bool:
    texts = (config, config.get_text_config()) if hasattr(config, "get_text_config") else (config,)
    return any(getattr(text, "tie_word_embeddings", False) for text in texts)


def _check_layer(name: str, layer: Any, known: set[str]) -> None:
    """Raise AdapterNotMergeable if a merge may do more than change the layer's own weight."""
    classes = _class(layer), *map(type, getattr(layer, "lora_variant", {}).values())
    unknown = set(map(_name, classes)) - known
    if unknown:
        raise AdapterNotMergeable(f"{name} is a {' and a '.join(sorted(unknown))}")
    if layer.merged:
        raise AdapterNotMergeable(f"{name} is merged already")
    # A merge adds the active adapters also where the layer computes without them.
    if layer.disable_adapters:
        raise AdapterNotMergeable(f"{name} has its adapters disabled")


def _layers(model: nn.Module, adapted: Mapping[str, Any]) -> Layers:
    """Find the keys of all LoRA layers in the model's state."""
    keys_of = defaultdict(list)
    for key, tensor in model.state_dict(keep_vars=True).items():
        keys_of[id(tensor)].append(key)
    layers: Layers = {}
    for name, layer in adapted.items():
        # The outermost of nested layers has the parameters of all.
        if any(name.startswith(f"{outer}.") for outer in adapted):
            continue
        key_of = {}
        for own, parameter in layer.named_parameters():
            keys = keys_of[id(parameter)]
            if len(keys) != 1:
                raise AdapterNotMergeable(
                    f"{name} has parameters that the model's state lacks, or has twice"
                )
            [key_of[own]] = keys
        layers |= dict.fromkeys(key_of.values(), (layer, key_of))
    return layers


def _class(layer: Any) -> type:
    """Return a layer's own class. FSDP2 replaces the class of a layer that it shards."""
    return type(layer).__bases__[-1] if isinstance(layer, FSDPModule) else type(layer)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _export(model: Any, layers: Layers) -> Iterator[NamedTensor]:
    """Yield the merged weights in the checkpoint's format, as the export without an adapter."""
    return in_checkpoint_format(_merged_state(model, layers), model.base_model.model)


def _merged_state(model: nn.Module, layers: Layers) -> Iterator[NamedTensor]:
    """Yield whole tensors with the names, order and dtypes of verl's own export."""
    device = get_device_id()
    state = model.state_dict()
    names = convert_weight_keys(normalize_peft_param_name({key: key for key in state}), model)
    merged: dict[str, Any] = {}  # tensors of one layer that are still to be exported
    for name, key in names.items():
        if key not in layers:
            merged[key] = _gathered(state[key], device)
        elif key not in merged:
            merged = _merged(*layers[key], state, device)
        # verl exports shards in bfloat16, and all other tensors as they are.
        dtype = torch.bfloat16 if isinstance(state[key], DTensor) else None
        yield name, merged.pop(key).to(dtype=dtype)


def _gathered(tensor: Any, device: Any) -> Any:
    """Return a whole tensor of the state. A `DTensor`'s may be the parameter's own memory."""
    if isinstance(tensor, DTensor):
        return tensor.to(device, non_blocking=True).full_tensor()  # type: ignore[attr-defined]
    return tensor.to(device, copy=True)


@torch.no_grad()
def _merged(
    layer: Any, keys: Mapping[str, str], state: Mapping[str, Any], device: Any
) -> dict[str, Any]:
    """Return copies of a layer's parameters with its adapters merged, by key of the state."""
    # On one rank a gathered tensor may be the parameter's own memory. The merge must not write to
    # it.
    tensors = {f"layer.{own}": _gathered(state[key], device).clone() for own, key in keys.items()}
    torch.func.functional_call(_Merge(layer), tensors, ())
    return {key: tensors[f"layer.{own}"] for own, key in keys.items()}


class _Merge(nn.Module):
    """A module that merges a layer's adapters when it is called with the layer's parameters."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = _twin(layer)

    def forward(self) -> None:
        # Layers are nested if PEFT wraps one module for several of its parameters.
        layer = self.layer
        while isinstance(layer, LoraLayer):
            layer.merge()
            layer = layer.base_layer


def _twin(layer: Any) -> Any:
    """Return a layer with the same submodules, and with PEFT's records of merges of its own."""
    # PEFT records merged adapters on the layer. With records of its own the twin leaves the layer
    # unmerged.
    twin: Any = object.__new__(_class(layer))
    twin.__dict__.update(vars(layer), merged_adapters=[], _caches={})
    if isinstance(layer.base_layer, LoraLayer):
        twin.__dict__["_modules"] = vars(layer)["_modules"] | {
            "base_layer": _twin(layer.base_layer)
        }
    return twin
