"""Tiny models of five families that a real server can generate with, on a CPU and on a GPU.

Sizes are the smallest that SGLang's Triton kernels take. Each is a case of
`contract.tiny_architecture_cases`, enlarged, so that names and weights come from one place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from contract.tiny_architecture_cases import CASES
from contract.tiny_architectures import Case, NamedWeights, read_checkpoint, save_checkpoint

SPECIAL_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VOCAB_SIZE = 320
_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # wide, so that a stale weight shows in the probabilities
    "eos_token_id": 256,
    "bos_token_id": 256,
    "pad_token_id": 257,
}
_HEAD = {"head_dim": 64}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_MLA: Mapping[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "q_lora_rank": 128,
    "moe_intermediate_size": 64,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_IMAGE = {
    "vision_start_token_id": 259,
    "vision_end_token_id": 260,
    "image_token_id": 261,
    "video_token_id": 262,
}
_GEMMA = {
    "query_pre_attn_scalar": 64,
    "sliding_window": 64,
    "final_logit_softcapping": None,  # SGLang has it for GPUs alone
}
_MROPE = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}


def _options(name: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What to change of the case: the model's options, and those of its text part."""
    return {
        "qwen3": ({**_COMMON, **_HEAD}, None),
        "qwen3-moe": ({**_COMMON, **_HEAD, **_EXPERTS}, None),
        "deepseek-v2": ({**_COMMON, **_MLA}, None),
        "deepseek-v3": ({**_COMMON, **_MLA, **_SIGMOID}, None),
        "qwen2_5-vl": (_IMAGE, {**_COMMON, "num_attention_heads": 2, "rope_parameters": _MROPE}),
        "gemma2": ({**_COMMON, **_HEAD, **_GEMMA}, None),
    }[name]


CYCLE_MODELS = {
    "qwen3": "dense",
    "qwen3-moe": "mixture of experts",
    "deepseek-v2": "MLA, whose w_kc and w_vc are derived; mixture of experts",
    "qwen2_5-vl": "vision and language",
    "gemma2": "a derived buffer, weight + 1",
}
MIXTURES_OF_EXPERTS = ("qwen3-moe", "deepseek-v2")


def case_of(name: str) -> Case:
    """The enlarged case of one of `CYCLE_MODELS`, or "deepseek-v3"."""
    case = next(case for case in CASES if case.name == name)
    options, text = _options(name)
    vision = case.vision
    if vision is not None:
        vision = {**vision, "out_hidden_size": _COMMON["hidden_size"]}
    return dataclasses.replace(
        case,
        options={**case.options, **options},
        text=None if case.text is None or text is None else {**case.text, **text},
        vision=vision,
    )


def make_model(name: str, folder: Path) -> None:
    """Write a random model with tokenizer, and processor where it sees, to `folder`."""
    from tiny_assets import byte_tokenizer

    torch.manual_seed(0)
    case = case_of(name)
    save_checkpoint(case, folder)
    tokenizer = byte_tokenizer()
    if case.vision is None:
        tokenizer.save_pretrained(folder)
        return
    import transformers

    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *SPECIAL_TOKENS]})
    transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
    ).save_pretrained(folder)


def checkpoint_weights(name: str, folder: Path, device: torch.device) -> NamedWeights:
    """The checkpoint's tensors as a trainer sends them."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return [
        (key, tensor.to(device, dtype)) for key, tensor in read_checkpoint(case_of(name), folder)
    ]
