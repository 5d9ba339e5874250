"""Shapes of public models, as Hugging Face configs, for models with random weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Config = dict[str, Any]

FOR_GPUS = ("qwen3-30b-a3b", "qwen3-8b", "qwen3-0.6b")
FOR_A_CPU = "tiny"
ROOM = 1.2
"""GPU memory needed, as a multiple of two copies of the weights. The rest is for KV cache, graphs
and libraries."""


def _dense(hidden: int, inter: int, layers: int, heads: int) -> Config:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _moe(dense: Config, experts: int, per_token: int, expert_inter: int) -> Config:
    return {
        **dense,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "moe_intermediate_size": expert_inter,
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        "norm_topk_prob": True,
    }


MODELS: dict[str, Config] = {
    "tiny": {**_dense(64, 128, 2, 8), "vocab_size": 512},  # for a CPU
    "small-moe": {  # for a CPU
        **_moe(_dense(512, 1536, 8, 8), 32, 4, 256),
        "vocab_size": 4096,
        "head_dim": 64,
    },
    "qwen3-0.6b": _dense(1024, 3072, 28, 16),
    "qwen3-4b": _dense(2560, 9728, 36, 32),
    "qwen3-8b": _dense(4096, 12288, 36, 32),
    # As many bytes as qwen3-8b, in 50 times as many tensors.
    "moe-16gb-20000": _moe(_dense(2048, 6144, 52, 32), 128, 8, 160),
    "qwen3-30b-a3b": _moe(_dense(2048, 6144, 48, 32), 128, 8, 768),
    "moe-110b": _moe(_dense(4096, 12288, 48, 32), 128, 8, 1408),  # four H200s
}


def write_config(folder: Path, model: str) -> Path:
    """Write a model's `config.json` into `folder`, as SGLang's `load_format=dummy` needs it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    return folder


def tensor_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor that the trainer exports. Experts are unfused."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    head_dim = config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield f"{prefix}.self_attn.{name}.weight", (rows, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, q)
        yield f"{prefix}.self_attn.q_norm.weight", (head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (head_dim,)
        yield from _mlp(config, f"{prefix}.mlp", hidden)
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def _mlp(config: Config, prefix: str, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    mlps = [(prefix, config["intermediate_size"])]
    if num_experts := config.get("num_experts"):
        yield f"{prefix}.gate.weight", (num_experts, hidden)
        inter = config["moe_intermediate_size"]
        mlps = [(f"{prefix}.experts.{expert}", inter) for expert in range(num_experts)]
    for name, inter in mlps:
        yield f"{name}.gate_proj.weight", (inter, hidden)
        yield f"{name}.up_proj.weight", (inter, hidden)
        yield f"{name}.down_proj.weight", (hidden, inter)


def weights_bytes(model: str, itemsize: int) -> int:
    """Return the size of a model's weights, in bytes, with numbers of `itemsize` bytes."""
    return itemsize * sum(math.prod(shape) for _, shape in tensor_shapes(MODELS[model]))


def largest_that_fits(gpu_bytes: int) -> str:
    """Return the largest model of `FOR_GPUS` that fits twice on one GPU, in bfloat16.

    Raises:
        ValueError: no model fits.
    """
    # One copy is the trainer's, the other the engine's.
    for model in FOR_GPUS:
        if gpu_bytes >= ROOM * 2 * weights_bytes(model, 2):
            return model
    raise ValueError(
        f"a GPU with {gpu_bytes / 1e9:.1f} GB: the smallest model, {FOR_GPUS[-1]}, needs "
        f"{ROOM * 2 * weights_bytes(FOR_GPUS[-1], 2) / 1e9:.1f} GB"
    )
