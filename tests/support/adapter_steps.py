"""What trainer ranks do with an engine that serves a LoRA adapter; PEFT's model is the measure."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from support.http_requests import Reply, post
from support.trainer import TrainerRank
from verl_sglang_sync.collective import WeightSyncError

RANK = 8
PROMPT = [5, 17, 42, 99, 7, 300, 12]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

LogProbs = list[float]
"""Of the prompt's tokens after the first."""


@dataclass(frozen=True)
class Adapted:
    """An adapter of a checkpoint, as verl exports it, and what PEFT's model makes of the prompt."""

    weights: dict[str, torch.Tensor]
    config: dict[str, Any]
    log_probs: LogProbs
    base_log_probs: LogProbs


def adapted(folder: Path, seed: int, rank: int = RANK) -> Adapted:
    """A random adapter of the checkpoint in `folder`."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=TARGETS, init_lora_weights=False
    )
    model: Any = get_peft_model(base, config)

    def log_probs() -> LogProbs:
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT])).logits[0]
        found = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])
        return [float(log_prob) for log_prob in found[:, 0]]

    with model.disable_adapter():
        base_log_probs = log_probs()
    return Adapted(
        dict(get_peft_model_state_dict(model)),
        model.peft_config["default"].to_dict(),
        log_probs(),
        base_log_probs,
    )


def _ask(rank: TrainerRank, adapter: str | None) -> Reply:
    return post(
        rank.url,
        "generate",
        {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "lora_path": adapter,
        },
    )


def served_adapters(
    rank: TrainerRank, first: Adapted, second: Adapted, large: Adapted
) -> dict[str, Any]:
    """Sync the base weights by a load plan, then one adapter after the other; one is too large.

    Returns:
        "first", "second", "base" and so on: the engine's log-probabilities, on the leader;
        "without": statuses of requests while no adapter is served; "error": why one was refused;
        "replayed": buckets of the base weights' second sync, of how many.
    """
    from verl.workers.rollout.sglang_rollout.utils import SGLANG_LORA_NAME

    from verl_sglang_sync.verl.adapter import collect_adapter

    manager = rank.manager("compiled", free_cache_engine=False)
    for version in ("0", "1"):
        asyncio.run(manager.sync(rank.weights(), version=version))
    report = manager.take_published()
    seen: dict[str, Any] = {"without": [], "replayed": None}
    if report is not None:
        seen["replayed"] = report.num_replayed, report.num_buckets

    def note(name: str, adapter: str | None = SGLANG_LORA_NAME) -> None:
        if rank.is_leader:
            status, text = _ask(rank, adapter)
            assert status == 200, text
            found = json.loads(text)["meta_info"]["input_token_logprobs"]
            seen[name] = [log_prob for log_prob, *_ in found[1:]]

    def note_without() -> None:
        if rank.is_leader:
            seen["without"].append(_ask(rank, SGLANG_LORA_NAME).status)

    def serve(adapter: Adapted) -> None:
        collect = partial(
            collect_adapter,
            adapter.weights.items(),
            adapter.config,
            num_ranks=rank.tp,
            is_leader=rank.is_leader,
        )
        asyncio.run(manager.sync_adapter(collect, version="2"))

    note("base", None)
    note_without()
    for name, adapter in (("first", first), ("second", second), ("first again", first)):
        serve(adapter)
        note(name)
    try:
        serve(large)
    except WeightSyncError as refused:
        seen["error"] = str(refused)
    note_without()
    serve(second)
    note("second again")
    note("base again", None)
    return seen
