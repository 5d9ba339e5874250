"""Tiny Llamas whose drafts the target accepts, though their weights are random.

What the layers of such a model write is zero, and its output layer is the embedding in another
order, so that its next token is a function of the last one alone, and never a close choice,
whatever kernels compute it. A draft knows the function:

- `STANDALONE`: the draft is another copy of the target.
- `EAGLE`: the draft has the target's embedding and output layer, which SGLang has them share, and
  passes the embedding on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_assets import byte_tokenizer

TARGET, OTHER, DRAFT = "model", "other", "draft"
NUM_STEPS = 3
"""Tokens that are drafted before each verification; one more is the target's own."""

_LLAMA: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
    "bos_token_id": 256,
    "eos_token_id": 256,
}


def make_models(algorithm: str, folder: Path) -> tuple[str, ...]:
    """Write target, draft, and weights of another target that the draft does not fit.

    Args:
        algorithm: "STANDALONE" or "EAGLE".
        folder: gets the folders `TARGET`, `OTHER` and, for EAGLE, `DRAFT`.

    Returns:
        SGLang's arguments.
    """
    is_eagle = algorithm == "EAGLE"
    _make_llama(folder / TARGET, seed=0)
    # A draft that passes the embedding on fits each target that does so.
    _make_llama(folder / OTHER, seed=1, layers_write=is_eagle)
    if is_eagle:
        _make_eagle_draft(folder / DRAFT)
    return (
        *("--speculative-algorithm", algorithm),
        *("--speculative-draft-model-path", str(folder / (DRAFT if is_eagle else TARGET))),
        *("--speculative-num-steps", str(NUM_STEPS), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(NUM_STEPS + 1)),
    )


def _make_llama(folder: Path, *, seed: int, layers: int = 2, layers_write: bool = False) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**_LLAMA, num_hidden_layers=layers))
    for name, parameter in model.named_parameters():
        if not layers_write and name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(parameter)
    if not layers_write:
        following = torch.randperm(_LLAMA["vocab_size"])
        model.lm_head.weight.data[following] = model.model.embed_tokens.weight.data
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def _make_eagle_draft(folder: Path) -> None:
    """One layer, after an `fc` that leaves out the target's hidden state."""
    _make_llama(folder, seed=2, layers=1)
    config = json.loads((folder / "config.json").read_text())
    eagle = {"architectures": ["LlamaForCausalLMEagle"]}
    (folder / "config.json").write_text(json.dumps(config | eagle))
    hidden = _LLAMA["hidden_size"]
    named = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name not in ("lm_head.weight", "model.norm.weight") and "input_layernorm" not in name
    }
    named["fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    named["fc.bias"] = torch.zeros(hidden)
    save_file(named, folder / "model.safetensors", {"format": "pt"})
