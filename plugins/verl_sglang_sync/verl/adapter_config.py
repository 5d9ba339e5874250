"""Converts PEFT's LoRA adapter to one that SGLang serves as it was trained, or names the obstacles.

    refused = config_refusals(config) + tensor_refusals(config, shapes)
    refused += layer_refusals(config, model)
    config, tensors = served_adapter(config, tensors)  # if nothing is refused

SGLang reads the rank, alpha and the target modules of PEFT's configuration. SGLang ignores all
other fields, and tensors outside the decoder layers. If an adapter lacks one of the projections
that SGLang fuses, the engine's process ends at the first request, by an assertion.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils.other import get_pattern_key
from torch import nn

EXPORTED = "default"
"""The name of the adapter that verl exports."""
CONVERTED = frozenset({"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"})
"""Fields whose effect `served_adapter` expresses in the fields that SGLang reads."""
SEEN_IN_TENSORS = frozenset(
    {
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
    }
)
"""Fields that choose the modules that have tensors."""
NOT_OF_THE_ROLLOUT = frozenset(
    {
        # Records, and where the adapter comes from.
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        # Settings of the training.
        *("inference_mode", "lora_dropout", "runtime_config"),
        # How the base layer stores its weight. A and B have the same layout either way.
        "fan_in_fan_out",
        # Details of the initialisation that `init_lora_weights` names.
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        # Read only where a refused field is set.
        *("megatron_core", "qalora_group_size"),
    }
)
"""Fields that do not change what a trained adapter computes."""
INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights as the checkpoint has them.

Other values change the base weights, which an engine may have from the checkpoint, or make a layer
of another kind.
"""

FUSED = (
    ({"q_proj", "k_proj", "v_proj"}, {"q_proj", "v_proj"}),
    ({"gate_proj", "up_proj"}, {"gate_proj"}),
    ({"q_a_proj", "kv_a_proj_with_mqa"}, {"q_a_proj", "kv_a_proj_with_mqa"}),
    *((names, names) for names in [{f"in_proj_{name}" for name in "qkvz"}]),
)
"""Pairs of sets of projections that SGLang fuses. With an adapter on any projection of the first
set SGLang fails unless all projections of the second set have one."""

_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?:[AB]\.weight|embedding_[AB])")
_LAYER = re.compile(r"layers\.(\d+)\.")  # as SGLang's get_layer_id
_EXPERT = re.compile(r"experts\.(\d+)\.")
_NO_DECODER = re.compile(r"vis(ion|ual)|audio")
_PEFT_PREFIX = "base_model.model."
_WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}
"""Parts of a module's name that neither PEFT's patterns nor verl's export have."""


def config_refusals(config: Mapping[str, Any]) -> list[str]:
    """List the fields of a PEFT configuration that SGLang would ignore, with their values.

    Returns:
        Texts such as "use_dora=True". Empty if SGLang serves such an adapter.
    """
    peft_type = _plain(config.get("peft_type"))
    if str(peft_type).upper() != "LORA":
        return [f"peft_type={peft_type!r}"]
    defaults = {
        field.name: _default(field) for field in dataclasses.fields(LoraConfig) if field.init
    }
    known = CONVERTED | SEEN_IN_TENSORS | NOT_OF_THE_ROLLOUT | {"peft_type"}
    refused = []
    for name, value in config.items():
        if name == "init_lora_weights":
            is_served = any(value is init or value == init for init in INITIALISATIONS)
        else:
            is_served = name in known or _is_off(value) or value == defaults.get(name)
        if not is_served:
            refused.append(f"{name}={_plain(value)!r}")
    return refused


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _is_off(value: Any) -> bool:
    is_empty = isinstance(value, (str, list, tuple, set, frozenset, dict)) and not value
    return is_empty or value is None or value is False or value == "none"


def tensor_refusals(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """List the tensors of an adapter that SGLang would drop, or at which it would fail.

    Args:
        shapes: shapes of the tensors, by PEFT's names.

    Returns:
        Texts that name a tensor or module. Empty if SGLang serves the adapter.
    """
    refused, modules = [], dict[str, None]()  # in the order of the export
    for name, shape in shapes.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            refused.append(f"{name} is no A or B of LoRA")
            continue
        modules[match["module"]] = None
        rank, _ = _rank_and_alpha(config, match["module"])
        if not _has_fused_experts(match["module"]) and shape[0 if _is_a(name) else 1] != rank:
            refused.append(f"{name} has shape {shape}, and its rank is {rank}")
    if not modules and not refused:
        return ["it has no tensors"]
    leaves: dict[str, set[str]] = defaultdict(set)
    places: dict[object, str] = {}
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        layer = _LAYER.search(f"{module}.")
        if _has_fused_experts(module):
            refused.append(f"{module} has fused experts")
        elif _NO_DECODER.search(module):
            refused.append(f"{module} is no part of the language model")
        elif layer is None and leaf not in ("embed_tokens", "lm_head"):
            refused.append(f"{module} is in no decoder layer")
        leaves[parent].add(leaf)
        expert = _EXPERT.search(f"{module}.")
        place = leaf, layer and layer[1], expert and expert[1]
        # A shared expert has a place of its own beside the experts, not beside another MLP.
        if (first := places.setdefault(place, module)) != module:
            refused.append(f"{module} would be served in the place of {first}")
    for parent, adapted in leaves.items():
        for fused, needed in FUSED:
            if adapted & fused and not needed <= adapted:
                refused.append(
                    f"{parent} has an adapter on {_names(adapted & fused)}, and SGLang needs one "
                    f"on {_names(needed - adapted)}"
                )
    return refused


def layer_refusals(config: Mapping[str, Any], model: nn.Module) -> list[str]:
    """List the layers that compute otherwise than the configuration and the tensors say.

    Returns:
        Texts that name a layer. Empty if all layers add the exported adapter, and no other one.
    """
    refused = []
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        name = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        exported = [EXPORTED] if EXPORTED in layer.scaling else []
        active = [adapter for adapter in layer.active_adapters if adapter in layer.scaling]
        if exported and layer.disable_adapters:
            refused.append(f"{name} has its adapters disabled")
        elif active != exported and not layer.disable_adapters:
            refused.append(f"{name} has the active adapters {active}, and SGLang's are {exported}")
        elif exported:
            rank, alpha = _rank_and_alpha(config, name)
            scale = layer.scaling[EXPORTED]
            if not math.isclose(scale, alpha / rank, rel_tol=1e-6):
                refused.append(f"{name} has the scale {scale:g}, and SGLang's is {alpha / rank:g}")
    return refused


def served_adapter(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Convert an adapter without refusals to one rank, one alpha, and a list of modules.

    Returns:
        The configuration as JSON has it, and the tensors.
    """
    sizes = {}
    for name in tensors:
        match = _TENSOR.fullmatch(name)
        assert match is not None, "it would be refused"
        sizes[name] = _rank_and_alpha(config, match["module"])
    rank, alpha = max(sizes.values())
    if len(set(sizes.values())) > 1:
        # SGLang multiplies by alpha / rank, which is 1 then. Each B has its own scale multiplied
        # in.
        alpha = rank
        tensors = {
            name: _scaled(name, tensor, rank, *sizes[name]) for name, tensor in tensors.items()
        }
    converted = {
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": {name.rpartition(".lora_")[0].rpartition(".")[2] for name in sizes},
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    return json_config({**config, **converted}), dict(tensors)


def json_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a PEFT configuration to JSON's types: sets to sorted lists, enums to their values."""
    return {name: _plain(value) for name, value in config.items()}


def _has_fused_experts(module: str) -> bool:
    """Return True if PEFT has put the adapter on a parameter that all experts share."""
    return module.endswith(".experts") or ".experts.base_layer" in module


def _is_a(name: str) -> bool:
    return name.removesuffix(".weight").endswith("A")


def _rank_and_alpha(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Return a module's rank, and the alpha with which alpha / rank is its scale."""
    module = module.removeprefix(_PEFT_PREFIX)
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    rank = ranks.get(get_pattern_key(list(ranks), module), config["r"])
    alpha = alphas.get(get_pattern_key(list(alphas), module), config["lora_alpha"])
    return rank, alpha * math.sqrt(rank) if config.get("use_rslora") else alpha


def _scaled(name: str, tensor: torch.Tensor, rank: int, own: int, alpha: float) -> torch.Tensor:
    """Fill a tensor up to `rank` with zeros, and multiply a B by its scale."""
    if _is_a(name):
        full = tensor.new_zeros(rank, tensor.shape[1])
        full[:own] = tensor
    else:
        full = tensor.new_zeros(tensor.shape[0], rank)
        full[:, :own] = tensor * (alpha / own)
    return full


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value), key=str)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    is_json = value is None or isinstance(value, (str, int, float, bool))
    return value if is_json else str(value)


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
