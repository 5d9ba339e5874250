"""Separate-async GRPO on the CPU: rollouts that a weight sync interrupts go on afterwards.

verl aborts what is generated when a sync begins, and asks again with the prompt and the tokens so
far when it has ended. Two batches are sampled before the first step. The second step finds its own
sampled, so that the third one has begun alone when it trains; the model is slow then, and its sync
finds these rollouts halfway. Each token must have been sampled with the weights of the version that
the trajectory names for it: verl's own checkpoints hold them.
"""

import json

import pytest
import torch
from quickstart import read_metrics
from tiny_assets import byte_tokenizer
from transformers import AutoModelForCausalLM

from support.settings import SEPARATE
from support.training import FINDING_TESTS, Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_STEPS, BATCH, RESPONSE = 4, 4 * 4, 64
SAME_LOG_PROB = 1e-4  # float32 on both sides, another order of sums
RUN = Run(
    "disaggregated",
    overrides=(
        *SEPARATE,
        "trainer.v1.separate_async.num_warmup_batches=1",  # one is sampled while one is trained
        f"trainer.total_training_steps={NUM_STEPS}",
        f"data.max_response_length={RESPONSE}",
        "trainer.save_freq=1",
        "trainer.default_local_dir={folder}/checkpoints",
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
        f"actor_rollout_ref.rollout.max_num_seqs={2 * BATCH}",  # none waits for another to end
    ),
    variables=(
        *FINDING_TESTS,
        "VERL_USE_EXTERNAL_MODULES=support.generations",
        "SGLANG_EXTERNAL_MODEL_PACKAGE=support.slow",
        "GENERATIONS={folder}/generations.jsonl",
        "TRAINING={folder}/training",
    ),
)


def models_of(folder):
    """The trainer's model, by version of its weights."""
    steps = (
        f"checkpoints/global_step_{step}/actor/huggingface" for step in range(1, NUM_STEPS + 1)
    )
    paths = [folder / path for path in ("model", *steps)]
    return [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths]


@torch.no_grad()
def log_probs_of(models, generation):
    """Of each token under each version of the weights: `[versions, tokens]`."""
    ids = torch.tensor([generation["prompt"] + generation["tokens"]])
    first = len(generation["prompt"])
    all_logits = torch.stack([model(ids).logits[0, first - 1 : -1] for model in models])
    of_tokens = ids[:, first:, None].expand(len(models), -1, -1)
    return all_logits.log_softmax(dim=-1).gather(2, of_tokens)[..., 0]


def versions_of(generation):
    """The version that the run lengths name for each token."""
    num_tokens, versions = torch.tensor(generation["weight_versions"]).T
    return versions.repeat_interleave(num_tokens)


@pytest.mark.parametrize("trained", [RUN], indirect=True, ids=["slow"])
def test_partial_rollouts_report_each_tokens_version(trained):
    """All trajectories of all batches, as the trainer has them."""
    lines = (trained / "generations.jsonl").read_text().splitlines()
    generations = [json.loads(line) for line in lines]
    assert len(generations) == NUM_STEPS * BATCH, "a rollout was lost"
    models, num_refuted = models_of(trained), {-1: 0, 1: 0}
    for generation in generations:
        tokens, runs = generation["tokens"], generation["weight_versions"]
        is_whole = len(tokens) == RESPONSE or tokens[-1] == byte_tokenizer().eos_token_id
        assert is_whole and len(tokens) == len(generation["log_probs"]) <= RESPONSE, generation
        named = [version for _, version in runs]
        assert named == sorted(set(named)), generation
        assert generation["min_global_steps"] <= named[0], generation
        assert named[-1] <= generation["max_global_steps"], generation
        versions, of_versions = versions_of(generation), log_probs_of(models, generation)
        told = torch.tensor(generation["log_probs"])
        fits = (of_versions - told).abs() < SAME_LOG_PROB
        positions = torch.arange(len(tokens))
        assert fits[versions, positions].all(), generation
        if len(runs) > 1:  # negative control: all boundaries one token earlier, or later
            for shift in num_refuted:
                moved = versions.roll(shift)
                moved[0], moved[-1] = versions[0], versions[-1]
                num_refuted[shift] += not fits[moved, positions].all()
    assert all(num_refuted.values()), "no sync has come between two tokens, or all versions fit"
    steps = [row["data"] for row in read_metrics(trained)]
    spans = [step["training/off_policy/trajectory_spans/max"] for step in steps]
    assert len(spans) == NUM_STEPS and spans[0] == 1 < max(spans), "as verl counts versions"
    assert steps[-1]["weight_sync/num_sent"] == 1, "by the route of such syncs, not exported"
