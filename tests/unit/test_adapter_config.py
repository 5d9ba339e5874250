"""A LoRA adapter that engines serve: each field of PEFT's configuration arrives, or is refused."""

import dataclasses
import json
import pickle
from base64 import b64decode
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from verl_sglang_sync.verl.adapter import check_adapter, collect_adapter
from verl_sglang_sync.verl.adapter_config import (
    CONVERTED,
    NOT_OF_THE_ROLLOUT,
    SEEN_IN_TENSORS,
    config_refusals,
    served_adapter,
    tensor_refusals,
)

PLAIN = LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
REFUSED = {
    "bias": "all",
    "modules_to_save": ["lm_head"],
    "init_lora_weights": "pissa",
    "megatron_config": {"tp": 1},
    "trainable_token_indices": [3],
    "use_dora": True,
    "velora_config": {"rank": 2},
    "alora_invocation_tokens": [1],
    "use_qalora": True,
    "monteclora_config": {"n": 1},
    "layer_replication": [[0, 1]],
    "lora_bias": True,
    "use_bdlora": {"a": 1},
    "arrow_config": {"a": 1},
    "kasa_config": {"a": 1},
    "ensure_weight_tying": True,
}
"""Each field of PEFT's that SGLang ignores, with a value that changes what the adapter computes."""
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LAYER = "base_model.model.model.layers.0"


def exported(base=None, **options):
    """A random adapter: its tensors and configuration as verl exports them, and PEFT's model."""
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, **options)
    model = get_peft_model(AutoModelForCausalLM.from_config(base or Qwen3Config(**SHAPE)), config)
    return dict(get_peft_model_state_dict(model)), model.peft_config["default"].to_dict(), model


def collected(weights, config):
    return collect_adapter(weights.items(), config, num_ranks=1, is_leader=True)


def test_every_field_of_the_installed_peft_is_decided():
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    decided = CONVERTED | SEEN_IN_TENSORS | NOT_OF_THE_ROLLOUT | {"peft_type"}
    assert not decided & REFUSED.keys()
    assert fields == (decided | REFUSED.keys()) & fields, "a new field of PEFT is not decided here"
    assert REFUSED.keys() <= fields
    assert config_refusals(PLAIN.to_dict()) == []
    for name, value in REFUSED.items():
        (refused,) = config_refusals({**PLAIN.to_dict(), name: value})
        assert refused.startswith(f"{name}="), refused


@pytest.mark.parametrize("value", [True, 3, "on", [1], {"a": 1}])
def test_a_field_of_newer_peft_is_refused(value):
    config = PLAIN.to_dict()
    assert config_refusals({**config, "use_later_lora": value}) == [f"use_later_lora={value!r}"]
    for off in (None, False, [], {}, "none"):
        assert config_refusals({**config, "use_later_lora": off}) == []


def test_another_kind_of_adapter_is_refused_by_name():
    for peft_type in PEFT_TYPE_TO_CONFIG_MAPPING:
        refused = config_refusals({**PLAIN.to_dict(), "peft_type": peft_type})
        assert refused == ([] if peft_type == "LORA" else [f"peft_type={peft_type.value!r}"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"alpha_pattern": {"o_proj": 9}},
        {"rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 7}},
        {"use_rslora": True, "rank_pattern": {"k_proj": 2}, "alpha_pattern": {"k_proj": 5}},
        {"target_modules": ["q_proj", "v_proj", "embed_tokens", "lm_head"]},
        {"target_modules": ["o_proj", "embed_tokens"], "rank_pattern": {"embed_tokens": 2}},
    ],
)
def test_what_is_served_computes_what_peft_computes(options):
    """By the one scale that SGLang has."""
    weights, config, model = exported(**{"target_modules": "all-linear", **options})
    update = collected(weights, config)
    assert update.refusal is None
    served = update.load.payload["config_dict"]
    payload = update.load.payload
    # one copy for all TP ranks in SGLang 0.5.14, one for each in later releases
    copies = payload.get("serialized_named_tensors") or [payload["serialized_tensors"]]
    tensors = pickle.loads(b64decode(copies[0]))
    seen = set()
    for name, layer in model.named_modules():
        if not hasattr(layer, "get_delta_weight"):
            continue
        ends = ["lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B"]
        a, b = (tensors[f"{name}.{end}"] for end in ends if f"{name}.{end}" in tensors)
        assert a.shape[0] == b.shape[1] == served["r"]
        delta = (b * (served["lora_alpha"] / served["r"])) @ a
        wanted = layer.get_delta_weight("default")
        torch.testing.assert_close(delta.T if "embed" in name else delta, wanted)
        seen.add(name.rpartition(".")[2])
    assert served["target_modules"] == sorted(seen)


def test_without_patterns_the_tensors_stay_unchanged():
    weights, config, _ = exported(target_modules="all-linear", use_rslora=True)
    served, tensors = served_adapter(config, weights)
    assert all(tensors[name] is tensor for name, tensor in weights.items())
    assert served["lora_alpha"] == 6 * 2


@pytest.mark.parametrize(
    ("base", "options"),
    [
        (Qwen3Config(**SHAPE), {"exclude_modules": ["k_proj", "o_proj"]}),
        (Qwen3MoeConfig(**SHAPE, **EXPERTS), {}),
        (Qwen3MoeConfig(**SHAPE, **EXPERTS), {"target_modules": "all-linear"}),
    ],
)
def test_sets_of_peft_are_sent_as_sorted_lists(base, options):
    weights, config, _ = exported(base, **{"target_modules": ["q_proj", "v_proj"], **options})
    sets = {name: value for name, value in config.items() if isinstance(value, set)}
    assert sets
    sent = json.loads(json.dumps(collected(weights, config).load.payload))["config_dict"]
    for name, value in sets.items():
        assert sent[name] == sorted(value)


def ab(*modules):
    return {f"{m}.lora_{side}.weight": (4, 4) for m in modules for side in "AB"}


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({}, "it has no tensors"),
        (ab(f"{LAYER}.self_attn.v_proj"), "SGLang needs one on q_proj"),
        (ab(f"{LAYER}.self_attn.q_proj"), "SGLang needs one on v_proj"),
        (ab(f"{LAYER}.mlp.up_proj"), "SGLang needs one on gate_proj"),
        (ab(f"{LAYER}.self_attn.q_a_proj"), "SGLang needs one on kv_a_proj_with_mqa"),
        (ab(f"{LAYER}.mlp.experts"), "has fused experts"),
        (ab("base_model.model.score"), "is in no decoder layer"),
        (ab("base_model.model.visual.layers.0.o_proj"), "is no part of the language model"),
        (
            ab(f"{LAYER}.mlp.down_proj", "base_model.model.mtp.layers.0.mlp.down_proj"),
            "would be served in the place of",
        ),
        ({f"{LAYER}.self_attn.o_proj.bias": (4,)}, "is no A or B of LoRA"),
        ({f"{LAYER}.self_attn.o_proj.lora_B.bias": (4,)}, "is no A or B of LoRA"),
        ({f"{LAYER}.self_attn.o_proj.lora_A.weight": (3, 4)}, "its rank is 4"),
    ],
)
def test_tensors_sglang_drops_or_ends_at_are_refused(shapes, reason):
    refused = tensor_refusals({"r": 4, "lora_alpha": 4}, shapes)
    assert any(reason in each for each in refused), refused


def test_experts_beside_a_shared_one_stay_in_place():
    experts = [f"{LAYER}.mlp.experts.{n}.down_proj" for n in range(3)]
    shapes = ab(*experts, f"{LAYER}.mlp.shared_expert.down_proj")
    assert tensor_refusals({"r": 4, "lora_alpha": 4}, shapes) == []


def test_a_refusal_names_reasons_and_advice():
    weights, config, _ = exported(target_modules=["v_proj"])
    update = collected(weights, config)
    assert "SGLang needs one on q_proj" in update.refusal
    assert "lora.merge=True" in update.refusal
    rank_without_engine = collect_adapter(weights.items(), config, num_ranks=1, is_leader=False)
    assert rank_without_engine.refusal == update.refusal


def test_configuration_is_checked_before_base_weights_are_synced():
    one, two = (SimpleNamespace(active_adapters=names) for names in (["default"], ["default", "b"]))
    check_adapter(PLAIN.to_dict(), one)
    with pytest.raises(ValueError, match="use_dora=True"):
        check_adapter({**PLAIN.to_dict(), "use_dora": True}, one)
    with pytest.raises(ValueError, match=r"\['b'\] are active"):
        check_adapter(PLAIN.to_dict(), two)


PATTERNS = {
    "target_modules": ["q_proj", "v_proj", "up_proj", "gate_proj", "embed_tokens"],
    "rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 7},
    "alpha_pattern": {"v_proj": 5},
}
Q = f"{LAYER}.self_attn.q_proj"


def wrapped(model):
    """The model with modules in wrappers, as those of FSDP1 and of checkpointed activations."""
    for layer in model.base_model.model.model.layers:
        layer.mlp = nn.ModuleDict({"_fsdp_wrapped_module": layer.mlp})
        attention = nn.ModuleDict({"_checkpoint_wrapped_module": layer.self_attn})
        layer.self_attn = nn.ModuleDict({"_orig_mod": attention})
    return model


@pytest.mark.parametrize("rslora", [False, True])
def test_layers_with_their_configured_scales_are_served(rslora):
    _, config, model = exported(**PATTERNS, use_rslora=rslora)
    model.add_adapter("second", LoraConfig(target_modules=["q_proj", "o_proj"]))
    with model.disable_adapter():
        pass  # as verl computes the log-probs of the reference
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    for layer in layers:
        layer.scale_layer(0.5)
        layer.unscale_layer()
    check_adapter(config, model)
    check_adapter(config, wrapped(model))
    for layer in layers:
        if "default" not in layer.scaling:
            layer.enable_adapters(False)  # it adds nothing either way
    check_adapter(config, model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model, q: model.base_model.disable_adapter_layers(), "has its adapters disabled"),
        (lambda model, q: q.enable_adapters(False), "has its adapters disabled"),
        (lambda model, q: q.scale_layer(0.5), "has the scale 1, and SGLang's is 2"),
        (lambda model, q: q.set_scale("default", 3), "has the scale 6, and SGLang's is 2"),
        (lambda model, q: q.scaling.update(default=9.0), "has the scale 9, and SGLang's is 2"),
        (
            lambda model, q: model.base_model.set_adapter([]),
            r"has the active adapters \[\], and SGLang's are \['default'\]",
        ),
        (
            lambda model, q: q.set_adapter(["default", "second"]),
            r"has the active adapters \['default', 'second'\], and SGLang's are \['default'\]",
        ),
    ],
)
def test_a_switched_or_rescaled_layer_is_refused(change, reason):
    _, config, model = exported(**PATTERNS)
    model.add_adapter("second", LoraConfig(target_modules=["q_proj"]))
    change(model, model.get_submodule(Q))
    for each in (model, wrapped(model)):
        with pytest.raises(ValueError, match=f"cannot serve[^$]*{Q} {reason}"):
            check_adapter(config, each)
