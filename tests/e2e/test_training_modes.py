"""verl's V1 trainer modes on the CPU, besides `sync`: in each the weights arrive, part by part.

In these modes a weight sync comes between two tokens of a response, and in `separate_async` two
kinds of replicas answer. So each part of a response that a server sampled is compared with the
trainer's model of the version that the server names. verl's own checkpoints hold these models.
"""

import ast
import json
import re

import pytest
import torch
from quickstart import read_metrics
from transformers import AutoModelForCausalLM

from support.training import FINDING_TESTS, Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SAME_LOG_PROB = 1e-4  # float32 on both sides, another order of sums
NUM_STEPS = 3
COLOCATED, STANDALONE = "colocated", "standalone"


def run_of(preset, *overrides, variables=()):
    """A training run whose parts of responses are recorded, with a model of every version."""
    return Run(
        preset,
        overrides=(
            f"trainer.total_training_steps={NUM_STEPS}",
            "data.max_response_length=32",
            # Of the whole machine's free memory, of which others may take some meanwhile.
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.8",
            "trainer.save_freq=1",
            "trainer.default_local_dir={folder}/checkpoints",
            "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
            *overrides,
        ),
        variables=(
            *FINDING_TESTS,
            "VERL_USE_EXTERNAL_MODULES=support.parts",
            "SGLANG_EXTERNAL_MODEL_PACKAGE=support.slow",
            "PARTS={folder}/parts.jsonl",
            *variables,
        ),
    )


V1 = "trainer.v1.separate_async"
BOTH_KINDS = (
    "trainer.v1.trainer_mode=separate_async",
    f"{V1}.parameter_sync_step=1",
    f"{V1}.num_warmup_batches=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "ray_kwargs.ray_init.num_gpus=2",
)
BACKEND = "actor_rollout_ref.rollout.checkpoint_engine"
COLOCATE_ASYNC = run_of(
    "compiled",
    "trainer.v1.trainer_mode=colocate_async",
    "trainer.total_training_steps=4",
    "data.max_response_length=64",
    variables=("STAGGER_S=1",),  # a step begins when some responses are halfway
)
HYBRID = run_of(
    "disaggregated",
    *BOTH_KINDS,
    "trainer.test_freq=1",  # verl syncs its colocated replicas only to validate
)
SWITCHING = run_of(
    "disaggregated",
    *BOTH_KINDS,
    f"{V1}.hybrid_rollout.enable_switch=True",
    f"{V1}.hybrid_rollout.switch_threshold_ratio=1.0",
    "data.max_response_length=64",  # GPUs are lent if a batch takes longer than a step
)
DELTAS = run_of(
    "compiled",
    *BOTH_KINDS,
    "trainer.test_freq=1",
    f"{BACKEND}.backend=delta_sharded",
    f"+{BACKEND}.engine_kwargs.delta_sharded.folder={{folder}}",
    f"{BACKEND}.custom_backend_module=support.delta_backend",
)


def models_of(folder):
    """The trainer's model, by version of its weights."""
    steps = range(1, len([*folder.glob("checkpoints/global_step_*")]) + 1)
    saved = [folder / f"checkpoints/global_step_{step}/actor/huggingface" for step in steps]
    paths = [folder / "model", *saved]
    return [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths]


def parts_of(folder):
    """All parts that have tokens, each with the kind of its server as "kind"."""
    log = (folder / "run.log").read_text()
    # verl prints each manager's servers: first those beside the trainer.
    groups = [ast.literal_eval(found) for found in re.findall(r"LLMServerManager: (\[.*?\])", log)]
    kinds = dict.fromkeys(groups[0], COLOCATED)
    kinds |= {address: STANDALONE for group in groups[1:] for address in group}
    lines = (folder / "parts.jsonl").read_text().splitlines()
    parts = [part for part in map(json.loads, lines) if part["tokens"]]
    return [part | {"kind": kinds[part["server"]]} for part in parts]


@torch.no_grad()
def log_probs_of(model, part):
    """The log probability of each token of a part under a model."""
    ids = torch.tensor([part["prompt"] + part["tokens"]])
    first = len(part["prompt"])
    logits = model(ids).logits[0, first - 1 : -1]
    return logits.log_softmax(dim=-1).gather(1, ids[0, first:, None])[:, 0]


def check_arrival(folder):
    """Check every part, and return the versions that each kind of server sampled with.

    As a negative control some part of each version must not fit the model of the version before.
    """
    models, versions = models_of(folder), {COLOCATED: set(), STANDALONE: set()}
    told_apart = set()
    for part in parts_of(folder):
        kind, version, sampled = part["kind"], part["version"], torch.tensor(part["log_probs"])
        off = (log_probs_of(models[version], part) - sampled).abs().max()
        assert off < SAME_LOG_PROB, (kind, version, off)
        before = (log_probs_of(models[max(version - 1, 0)], part) - sampled).abs().max()
        if before > SAME_LOG_PROB:
            told_apart.add((kind, version))
        versions[kind].add(version)
    for kind, seen in versions.items():
        assert {(kind, version) for version in seen - {0}} <= told_apart, "a stale one would pass"
    return versions


def reports_of(folder):
    lines = (folder / "syncs.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def trained_with(run, name):
    return pytest.mark.parametrize("trained", [run], indirect=True, ids=[name])


@trained_with(COLOCATE_ASYNC, "colocate_async")
def test_colocated_rollouts_use_each_syncs_weights(trained):
    versions = check_arrival(trained)
    # Four batches are trained, and until the second step's sync three have been asked for.
    assert max(versions[COLOCATED]) > 1 and not versions[STANDALONE]
    spans = [
        row["data"]["training/off_policy/trajectory_spans/max"] for row in read_metrics(trained)
    ]
    assert max(spans) > 1, "no sync came between two tokens"
    reports = reports_of(trained)
    assert [report["weight_version"] for report in reports] == ["0", "1", "2", "3", "4"]
    check_replayed(reports[1:])


@trained_with(HYBRID, "hybrid_engine")
def test_both_kinds_of_replicas_get_every_sync(trained):
    """Colocated ones are synced for each validation, standalone ones after each step."""
    versions = check_arrival(trained)
    assert versions[COLOCATED] >= set(range(1, NUM_STEPS + 1))
    assert versions[STANDALONE] >= set(range(NUM_STEPS))
    check_reports(trained)


@trained_with(SWITCHING, "enable_switch")
def test_a_trainers_idle_gpus_serve_the_new_weights(trained):
    versions = check_arrival(trained)
    rows = [row["data"] for row in read_metrics(trained)]
    lent = [row["separate_async/decision/should_switch_to_rollout"] for row in rows]
    assert any(lent), "the trainer lent its GPUs to generation"
    assert max(versions[COLOCATED]) > 0
    assert versions[STANDALONE] >= set(range(1, NUM_STEPS))
    check_reports(trained)
    assert "ignores reject_request" not in (trained / "run.log").read_text()


def check_reports(folder):
    """Check that syncs of both kinds were made, as fast as they can be on a CPU under FSDP2."""
    reports = reports_of(folder)
    colocated = [report for report in reports if report["replica"] == 0]
    standalone = [report for report in reports if report["replica"] is None]
    assert len(colocated) > 1
    check_replayed([*colocated[1:], *standalone[1:]])
    assert [report["num_sent"] for report in standalone[2:]] == [1] * (len(standalone) - 2)


def check_replayed(reports):
    """Check that engines loaded by their load plans; `load_weights` loads the first sync."""
    for report in reports:
        assert report["num_replayed"] == report["num_buckets"] == 1, report


@trained_with(DELTAS, "delta_sharded")
def test_a_preset_serves_replicas_without_verls_deltas(trained):
    versions = check_arrival(trained)
    assert versions[COLOCATED] >= set(range(1, NUM_STEPS + 1))
    assert versions[STANDALONE] >= set(range(NUM_STEPS))
    assert {report["replica"] for report in reports_of(trained)} == {0}, "no standalone replica"
    log = (trained / "run.log").read_text()
    assert "verl's own backend updates the standalone replicas" in log
