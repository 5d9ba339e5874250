"""Tiny models of many families that a real server can generate with, on a CPU and on a GPU, in
bfloat16 and in verl's fp8.

Sizes are the smallest that SGLang's Triton kernels take, in whole blocks of verl's fp8, 128 x 128.
Each is a case of `contract.tiny_architecture_cases`, enlarged, so that names and weights come from
one place.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from contract.tiny_architecture_cases import case_named
from contract.tiny_architectures import Case, NamedWeights, read_checkpoint, save_checkpoint

Options = dict[str, Any]

SPECIAL_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
HIDDEN_SIZE = 256
_COMMON: Options = {
    "vocab_size": 320,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # wide, so that a stale weight shows in the probabilities
    "eos_token_id": 256,
    "bos_token_id": 256,
    "pad_token_id": 257,
}
_HEAD = {"head_dim": 128}
_EXPERTS = {"moe_intermediate_size": 256}  # verl drops the last dimension of one block
_MLA: Options = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    **_EXPERTS,
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
_MLA_Q: Options = {**_MLA, "q_lora_rank": 128, "n_group": 1, "topk_group": 1}
_IMAGE = {
    "vision_start_token_id": 259,
    "vision_end_token_id": 260,
    "image_token_id": 261,
    "video_token_id": 262,
}
_MROPE = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 10000.0}
_TIED = "tie_word_embeddings"
_OPTIONS: dict[str, Options] = {
    "qwen3": _HEAD,
    "qwen3-moe": {**_HEAD, **_EXPERTS},
    "qwen2-moe": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "hidden_size": 512,
        "shared_expert_intermediate_size": 256,
    },
    "deepseek-v2-lite": _MLA,
    "deepseek-v2": {**_MLA_Q, "topk_method": "greedy"},
    "deepseek-v3": {**_MLA_Q, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "qwen2_5-vl": {"num_attention_heads": 2, "rope_parameters": _MROPE},
    "qwen3-vl": {**_HEAD, "rope_parameters": _MROPE, _TIED: True},
    "qwen3-vl-moe": {**_HEAD, "moe_intermediate_size": 128, "rope_parameters": _MROPE},
    "gemma2": {
        **_HEAD,
        "query_pre_attn_scalar": 64,
        "sliding_window": 64,
        "final_logit_softcapping": None,  # SGLang has it for GPUs alone
    },
}


def case_of(name: str) -> Case:
    """The case of that name, enlarged."""
    case, options = case_named(name), {**_COMMON, **_OPTIONS[name]}
    if case.text is None or case.vision is None:
        return dataclasses.replace(case, options={**case.options, **options})
    return dataclasses.replace(
        case,
        options={**case.options, **_IMAGE, _TIED: options.get(_TIED, False)},
        text={**case.text, **options},
        vision={**case.vision, "out_hidden_size": HIDDEN_SIZE},
    )


def make_model(name: str, folder: Path) -> None:
    """Write a random model with tokenizer, and processor where it sees, to `folder`."""
    from tiny_assets import byte_tokenizer

    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    case, tokenizer = case_of(name), byte_tokenizer()
    save_checkpoint(case, folder)
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
    tensors = read_checkpoint(case_of(name), folder)
    return [(key, tensor.to(device, dtype)) for key, tensor in tensors]


def quantizer() -> Any:
    """verl's, as its rollout makes it."""
    from verl.utils.sglang import sglang_fp8_utils as verls

    return verls.SGLangFP8QuantizerHelper(verls.build_sglang_fp8_quant_config())


def model_override() -> str:
    """SGLang's `json_model_override_args` for fp8, as verl launches its server."""
    return json.dumps({"quantization_config": quantizer().quant_config})
