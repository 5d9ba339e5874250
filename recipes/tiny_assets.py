"""Makes a tiny random model, a byte-level tokenizer and a dataset, offline, for runs on a CPU.

python recipes/tiny_assets.py outputs/tiny --architecture qwen3_moe
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import pandas
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

ARCHITECTURES = ("qwen3", "qwen3_moe")
NUM_PROMPTS = 32
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_assets(
    folder: Path,
    *,
    architecture: str = "qwen3",
    tied: bool = False,
    layers: int = 2,
    experts: int = 4,
    seed: int = 0,
) -> None:
    """Write `folder/model`, `folder/train.parquet` and `folder/val.parquet`.

    Args:
        folder: made if missing.
        architecture: one of `ARCHITECTURES`.
        tied: share the embedding with the output layer.
        layers: of the model.
        experts: of each layer of a "qwen3_moe".
        seed: of the random weights and prompts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    config = _config(architecture, tied, layers, experts, tokenizer)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = _prompts(random.Random(seed))
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows[:4]).to_parquet(folder / "val.parquet")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, plus a chat template's markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _config(
    architecture: str, tied: bool, layers: int, experts: int, tokenizer: PreTrainedTokenizerFast
) -> Qwen3Config | Qwen3MoeConfig:
    common: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,  # wide, so that a stale weight shows in the probabilities
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if architecture == "qwen3":
        return Qwen3Config(**common)
    if architecture == "qwen3_moe":
        return Qwen3MoeConfig(
            **common,
            num_experts=experts,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            norm_topk_prob=True,
        )
    raise ValueError(f"architecture={architecture!r}: allowed: {', '.join(ARCHITECTURES)}")


def _prompts(rng: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": f"say {rng.randint(0, 99)}"}],
            "ability": "letters",
            "reward_model": {"style": "rule", "ground_truth": "a"},
            "extra_info": {"index": index},
        }
        for index in range(NUM_PROMPTS)
    ]


def main() -> None:
    """Command line: see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="qwen3")
    parser.add_argument("--tied", action="store_true")
    args = parser.parse_args()
    make_assets(args.folder, architecture=args.architecture, tied=args.tied)


if __name__ == "__main__":
    main()
