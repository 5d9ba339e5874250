"""Separate-async GRPO on the CPU: rollouts that a weight sync interrupts go on afterwards.

verl aborts what is generated when a sync begins, and asks again with the prompt and the tokens so
far when it has ended. The model is slow here, so that every sync finds rollouts halfway. Each token
must have been sampled with the weights of one version, which verl's own checkpoints hold.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quickstart import read_metrics, run_recipe
from rich.console import Console
from tiny_assets import byte_tokenizer, make_assets
from transformers import AutoModelForCausalLM

from support.forks import TESTS
from support.settings import SEPARATE

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_STEPS, BATCH, RESPONSE = 3, 4 * 4, 64
SAME_LOG_PROB = 1e-4  # float32 on both sides, another order of sums
OVERRIDES = (
    *SEPARATE,
    "trainer.v1.separate_async.num_warmup_batches=1",  # one is sampled while one is trained
    f"trainer.total_training_steps={NUM_STEPS}",
    f"data.max_response_length={RESPONSE}",
    "trainer.save_freq=1",
    "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
    "actor_rollout_ref.rollout.custom.weight_sync.mode=compiled",
)


def train(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What agent loops got for their requests, in the order in which they ended."""
    make_assets(folder)
    monkeypatch.setenv("PYTHONPATH", TESTS)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "support.generations")
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "support.slow")
    monkeypatch.setenv("GENERATIONS", str(folder / "generations.jsonl"))
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "WARN")  # see recipes/grpo_separate_async_gpu.sh
    checkpoints = f"trainer.default_local_dir={folder}/checkpoints"
    console = Console(quiet=True)
    status = run_recipe(folder, "disaggregated", *OVERRIDES, checkpoints, console=console)
    assert status == 0, (folder / "run.log").read_text()[-6000:]
    lines = (folder / "generations.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def models_of(folder: Path) -> list[Any]:
    """The trainer's model, by version of its weights."""
    steps = (
        f"checkpoints/global_step_{step}/actor/huggingface" for step in range(1, NUM_STEPS + 1)
    )
    paths = [folder / path for path in ("model", *steps)]
    return [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths]


@torch.no_grad()
def versions_of(models: list[Any], generation: dict[str, Any]) -> list[int]:
    """With which version each token was sampled, of those that were told; they never go back."""
    ids = torch.tensor([generation["prompt"] + generation["tokens"]])
    told = torch.tensor(generation["log_probs"])
    version, versions = generation["min_version"], []
    fits = []
    for model in models:
        of_all = model(ids).logits[0, -len(told) - 1 : -1].log_softmax(dim=-1)
        of_tokens = of_all.gather(1, ids[0, -len(told) :, None])[:, 0]
        fits.append((of_tokens - told).abs() < SAME_LOG_PROB)
    for index in range(len(told)):
        while version <= generation["max_version"] and not fits[version][index]:
            version += 1
        assert version <= generation["max_version"], f"token {index} of {generation}"
        versions.append(version)
    return versions


def test_rollouts_go_on_after_a_sync_and_tell_the_versions_of_their_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations = train(tmp_path, monkeypatch)
    assert len(generations) >= NUM_STEPS * BATCH, "a rollout was lost"
    models, continued = models_of(tmp_path), []
    for generation in generations:
        tokens = generation["tokens"]
        is_whole = len(tokens) == RESPONSE or tokens[-1] == byte_tokenizer().eos_token_id
        assert is_whole and len(tokens) == len(generation["log_probs"]) <= RESPONSE, generation
        if len(set(versions_of(models, generation))) > 1:
            continued.append(generation)
    assert continued, "no sync has come between two tokens"
    wrong = {**continued[0], "min_version": continued[0]["max_version"]}
    with pytest.raises(AssertionError, match="token 0 of"):
        versions_of(models, wrong)
    steps = [row["data"] for row in read_metrics(tmp_path)]
    spans = [step["training/off_policy/trajectory_spans/max"] for step in steps]
    assert len(spans) == NUM_STEPS and spans[0] == 1 < max(spans), "as verl counts versions"
    assert steps[-1]["weight_sync/num_sent"] == 1, "by the route of such syncs, not exported"
