"""A LoRA adapter that a real TP 2 engine serves as such, replaced while its base weights stay.

PEFT's model is the measure.
"""

import asyncio
import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from tiny_assets import make_assets

from support.http_requests import post
from support.served import served
from verl_sglang_sync.trainer_ranks import WeightSyncError

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RANK = 8
PROMPT = [5, 17, 42, 99, 7, 300, 12]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WITH_LORA = (
    *("--enable-lora", "--max-lora-rank", str(RANK), "--lora-target-modules", *TARGETS),
    *("--lora-backend", "torch_native", "--max-loras-per-batch", "2"),
)
WITHOUT_PINNED_MEMORY = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "support.unpinned"}

CONVERTED: tuple[dict[str, Any], ...] = (
    {"use_rslora": True},
    {"use_rslora": True, "rank_pattern": {"q_proj": 4, "layers.0.mlp.up_proj": 2}},
    {"alpha_pattern": {"o_proj": 5}, "exclude_modules": ["down_proj"]},
    {"target_modules": ["q_proj", "v_proj"]},
)
"""Options of PEFT that SGLang does not read."""

LogProbs = list[float]
"""Of the prompt's tokens after the first."""


@dataclass(frozen=True)
class Adapted:
    """An adapter of a checkpoint, as verl exports it, and what PEFT's model makes of the prompt."""

    weights: dict[str, torch.Tensor]
    config: dict[str, Any]
    log_probs: LogProbs
    base_log_probs: LogProbs


def adapted(folder, seed, rank=RANK, **options):
    """A random adapter of the checkpoint in `folder`."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"r": rank, "lora_alpha": 2 * rank, "target_modules": TARGETS, **options}
    config = LoraConfig(**options, init_lora_weights=False)
    model = get_peft_model(base, config)

    def log_probs():
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT])).logits[0]
        found = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])
        return [float(log_prob) for log_prob in found[:, 0]]

    with model.disable_adapter():
        base_log_probs = log_probs()
    weights = dict(get_peft_model_state_dict(model))
    return Adapted(weights, model.peft_config["default"].to_dict(), log_probs(), base_log_probs)


def sync_base(rank):
    """By a load plan; buckets of the second sync that were replayed, of how many."""
    manager = rank.kept_manager("compiled", free_cache_engine=False)
    for version in ("0", "1"):
        asyncio.run(manager.sync(rank.weights(), version=version))
    report = manager.take_written()
    return None if report is None else (report.num_replayed, report.num_buckets)


def serve(rank, weights, config):
    """Have the engine serve this adapter alone; why it does not."""
    from verl_sglang_sync.verl.adapter import collect_adapter

    ranks = {"num_ranks": rank.tp, "is_leader": rank.is_leader}
    collect = partial(collect_adapter, weights.items(), config, **ranks)
    manager = rank.kept_manager("compiled", free_cache_engine=False)
    try:
        asyncio.run(manager.sync_adapter(collect, version="2"))
    except WeightSyncError as refused:
        return str(refused)
    return ""


def served_log_probs(url, adapter):
    status, text = ask(url, adapter)
    assert status == 200, text
    found = json.loads(text)["meta_info"]["input_token_logprobs"]
    return [log_prob for log_prob, *_ in found[1:]]


def ask(url, adapter):
    payload = {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 0}
    sampling = {"sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    return post(url, "generate", payload | sampling | {"lora_path": adapter})


def test_a_replaced_engine_serves_the_policy_again(tmp_path):
    """Its checkpoint has other base weights than the trainer."""
    from verl.workers.rollout.sglang_rollout.utils import SGLANG_LORA_NAME

    from verl_sglang_sync.verl.adapter import collect_adapter

    make_assets(tmp_path)
    adapter = adapted(tmp_path / "model", 1)
    collect = partial(
        collect_adapter, adapter.weights.items(), adapter.config, num_ranks=1, is_leader=True
    )
    start = partial(served, model=tmp_path / "model", extra=WITH_LORA)
    start = partial(start, variables=WITHOUT_PINNED_MEMORY)
    with start(tmp_path / "first") as first, start(tmp_path / "second") as second:
        trainer = first.trainer()
        manager = trainer.kept_manager("compiled", free_cache_engine=False)

        def base():
            return [(n, t * (1.5 if "proj" in n else 1)) for n, t in trainer.weights()]

        asyncio.run(manager.sync(base(), version="0"))
        for version, engine in (("1", first), ("2", second), ("3", second)):
            trainer.client.base_url = engine.url
            asyncio.run(manager.sync_adapter(collect, version=version, base=base))
        assert (first.version, second.version) == ("0", "2")
        wanted, found = (served_log_probs(e.url, SGLANG_LORA_NAME) for e in (first, second))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    assert max(abs(a - b) for a, b in zip(found, adapter.log_probs, strict=True)) > 0.01


def test_adapters_are_served_replaced_or_refused_by_name(tmp_path):
    from verl.workers.rollout.sglang_rollout.utils import SGLANG_LORA_NAME

    close = partial(torch.testing.assert_close, atol=1e-4, rtol=0)
    make_assets(tmp_path)
    first, second = (adapted(tmp_path / "model", seed) for seed in (1, 2))
    large = adapted(tmp_path / "model", 3, rank=2 * RANK)
    converted = [adapted(tmp_path / "model", 4, **options) for options in CONVERTED]
    ends_engines = adapted(tmp_path / "model", 5, target_modules=["v_proj"])
    with (
        served(tmp_path, tp=2, extra=WITH_LORA, variables=WITHOUT_PINNED_MEMORY) as engine,
        engine.ranks() as ranks,
    ):

        def log_probs(adapter=SGLANG_LORA_NAME):
            return served_log_probs(engine.url, adapter)

        num_replayed, num_buckets = ranks.run(sync_base)[0]
        assert num_replayed == num_buckets > 0
        base, seen = log_probs(None), []
        assert ask(engine.url, SGLANG_LORA_NAME).status == 400, (
            "nobody is served without what it asks for"
        )
        for adapter in (first, second, first):
            assert ranks.run(serve, adapter.weights, adapter.config) == ["", ""]
            seen.append(log_probs())
        (error,) = set(ranks.run(serve, ends_engines.weights, ends_engines.config))
        assert "SGLang needs one on q_proj" in error
        assert log_probs() == seen[-1], "the engine serves what it served"
        for adapter in converted:
            assert ranks.run(serve, adapter.weights, adapter.config) == ["", ""]
            close(log_probs(), adapter.log_probs)
        (error,) = set(ranks.run(serve, large.weights, large.config))
        assert "stage 'load_adapter' failed" in error and str(2 * RANK) in error, error
        assert ask(engine.url, SGLANG_LORA_NAME).status == 400
        assert ranks.run(serve, second.weights, second.config) == ["", ""]
        seen.append(log_probs())
        assert log_probs(None) == base
    close(base, first.base_log_probs)
    for found, adapter in zip(seen, (first, second, first, second), strict=True):
        close(found, adapter.log_probs)
    for one, other in ((seen[0], base), (seen[1], base), (seen[0], seen[1])):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.01, "they are the same"
