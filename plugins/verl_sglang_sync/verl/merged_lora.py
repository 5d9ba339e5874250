"""Exports an FSDP2 model with its LoRA adapters merged, and leaves the model as it is.

verl's own export of merged adapters loads the model onto the GPU, copies the base weights to the
host, merges into the live parameters, and restores them. Here PEFT merges into gathered copies of
one layer after the other, wherever the model's own parameters are:

    export = merged_export(engine)  # None: the adapters are not merged, or the model is FSDP1's
    for name, tensor in export(): ...       # collective over all ranks

verl's own export merges only `LoraLayer`s, and of FSDP2's root unit none: base weights would be
served in place of the policy. So an adapter that is not known to merge rightly is refused by name,
with FSDP1 too, before anything is exported.
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
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from verl_sglang_sync.sources.export import NamedTensor

KNOWN = {
    name.format(layer)
    for layer in ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d")
    for name in ("peft.tuners.lora.layer.{}", "peft.tuners.lora.variants.Dora{}Variant")
}
"""Classes of layers, and of variants of LoRA, whose merge changes the layer's own weight and bias
alone; by name, since not every release of PEFT has them all.
"""
FUSED_EXPERTS = {"peft.tuners.lora.layer.ParamWrapper"}
"""As `KNOWN`, but only with FSDP2: one module is wrapped once for each of its parameters."""

Layers = dict[str, tuple[Any, dict[str, str]]]
"""By key of the model's state: the LoRA layer that it is of, and the key of each of its parameters,
by their names in the layer."""


class AdapterNotMergeable(ValueError):
    """An adapter whose merged weights would not be those of the trained model."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"weight sync: the adapter cannot be merged for the rollout: {reason}. Nothing was "
            "exported. Train LoRA or DoRA on linear layers, embeddings, convolutions or, with "
            "FSDP2, fused experts, without `modules_to_save` and `trainable_token_indices`."
        )


def merged_export(engine: Any) -> Callable[[], Iterator[NamedTensor]] | None:
    """Make the export of a verl engine that merges adapters; None where verl makes it.

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
    """Raise AdapterNotMergeable for what is trained beside the adapter's layers."""
    kind = _class(model.base_model if isinstance(model, PeftModel) else model)
    if kind is not LoraModel:
        raise AdapterNotMergeable(f"the model is a {_name(kind)}, not a {_name(LoraModel)}")
    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise AdapterNotMergeable(f"{name} is a {_name(_class(module))}")
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
    others = set(map(_name, classes)) - known
    if others:
        raise AdapterNotMergeable(f"{name} is a {' and a '.join(sorted(others))}")
    if layer.merged:
        raise AdapterNotMergeable(f"{name} is merged already")


def _layers(model: nn.Module, adapted: Mapping[str, Any]) -> Layers:
    """Find the state's keys of all LoRA layers; of nested ones the outermost has them all."""
    keys_of = defaultdict(list)
    for key, tensor in model.state_dict(keep_vars=True).items():
        keys_of[id(tensor)].append(key)
    layers: Layers = {}
    for name, layer in adapted.items():
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
    """The layer's class, without the one that FSDP2 derives from it where it shards the layer."""
    return type(layer).__bases__[-1] if isinstance(layer, FSDPModule) else type(layer)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _export(model: Any, layers: Layers) -> Iterator[NamedTensor]:
    """Name the tensors as verl's export without an adapter does, with experts taken apart."""
    yield from unfuse_moe_params(_merged_state(model, layers), model.config.model_type)


def _merged_state(model: nn.Module, layers: Layers) -> Iterator[NamedTensor]:
    """As verl's own: the same names in the same order, whole, those of shards in bfloat16."""
    device = get_device_id()
    state = model.state_dict()
    names = convert_weight_keys(normalize_peft_param_name({key: key for key in state}), model)
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
        self.layer = _twin(layer)

    def forward(self) -> None:
        layer = self.layer
        while isinstance(layer, LoraLayer):
            layer.merge()
            layer = layer.base_layer


def _twin(layer: Any) -> Any:
    twin: Any = object.__new__(_class(layer))
    twin.__dict__.update(vars(layer), merged_adapters=[], _caches={})
    if isinstance(layer.base_layer, LoraLayer):
        twin.__dict__["_modules"] = vars(layer)["_modules"] | {
            "base_layer": _twin(layer.base_layer)
        }
    return twin
