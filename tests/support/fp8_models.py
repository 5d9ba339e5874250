"""Tiny models whose weights are whole blocks of verl's fp8, 128 x 128, and their quantiser."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from contract.tiny_architecture_cases import case_named
from contract.tiny_architectures import Case, save_checkpoint

_COMMON = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # wide, so that a stale weight shows in the probabilities
}
_ATTENTION = {"head_dim": 128}
_EXPERTS = {"moe_intermediate_size": 256}  # verl drops the last dimension of one block
_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_OPTIONS = {
    "qwen3": _ATTENTION,
    "qwen3-moe": {**_ATTENTION, **_EXPERTS},
    "qwen2-moe": {
        **_EXPERTS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 512,
        "shared_expert_intermediate_size": 256,
    },
    "deepseek-v2-lite": {**_MLA, **_EXPERTS},
}


def case_of(name: str) -> Case:
    """The case of that name, widened."""
    case = case_named(name)
    return dataclasses.replace(case, options={**case.options, **_COMMON, **_OPTIONS[name]})


def make_model(name: str, folder: Path) -> None:
    """Write a random checkpoint in bfloat16, with a tokenizer."""
    from tiny_assets import byte_tokenizer

    save_checkpoint(case_of(name), folder)
    byte_tokenizer().save_pretrained(folder)


def quantizer() -> Any:
    """verl's, as its rollout makes it."""
    from verl.utils.sglang import sglang_fp8_utils as verls

    return verls.SGLangFP8QuantizerHelper(verls.build_sglang_fp8_quant_config())


def model_override() -> str:
    """SGLang's `json_model_override_args`, as verl launches its server."""
    return json.dumps({"quantization_config": quantizer().quant_config})
