"""Real verl training on the CPU: GRPO and PPO, TP 2, two replicas; the weights arrive.

The engine starts from random weights (`load_format=dummy`), both sides compute in float32, so the
probabilities of the sampled tokens agree only if every sync arrived. Some runs drop a sync on
purpose: the same check must fail there.
"""

import json
import re
from functools import partial

import pytest
from quickstart import Step, read_metrics, read_steps

from support.settings import SEPARATE
from support.training import FINDING_TESTS, Run

pytestmark = pytest.mark.e2e

PPO = (
    "critic.model.path={folder}/model",
    "algorithm.adv_estimator=gae",
    "critic.strategy=fsdp2",
    "critic.use_dynamic_bsz=False",
    "critic.ppo_mini_batch_size=4",
    "critic.ppo_micro_batch_size_per_gpu=8",
    "critic.model.use_remove_padding=False",
    "critic.model.enable_gradient_checkpointing=False",
    "+critic.model.override_config.attn_implementation=sdpa",
    "critic.fsdp.dtype=float32",
    "+critic.fsdp.mixed_precision.param_dtype=fp32",
    "+critic.fsdp.mixed_precision.reduce_dtype=fp32",
)

LORA = (
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=32",
    "actor_rollout_ref.model.target_modules=all-linear",
    "actor_rollout_ref.actor.optim.lr=0.1",
)
MERGED_LORA = (
    *LORA,
    "actor_rollout_ref.model.lora.merge=True",
    "actor_rollout_ref.rollout.multi_stage_wake_up=False",
    "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",  # what is exported: no cast copies it
    "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16",
)
ADAPTER = (
    *LORA,
    "trainer.total_training_steps=3",
    "+actor_rollout_ref.rollout.engine_kwargs.sglang.lora_backend=torch_native",
)
LOSING = (*FINDING_TESTS, "VERL_USE_EXTERNAL_MODULES=support.drop_sync")
MIN_PEARSON_LORA = 0.999
"""The merged weights are rounded to bfloat16, the trainer's adapters are not."""


def check_arrival(steps):
    for step in steps:
        assert step.arrived, step.metrics
        assert step.metrics["actor/grad_norm"] > 0.1, "the weights must have moved"
        assert step.sync["num_buckets"] >= 1


def reports_of(folder):
    """Of all syncs and replicas; the first sync precedes the first step, each step ends in one."""
    return [json.loads(line) for line in (folder / "syncs.jsonl").read_text().splitlines()]


run = partial(pytest.mark.parametrize, "trained", indirect=True)


@run([pytest.param(Run("compiled", workers=2, tp=2, tied=True, overrides=PPO), id="ppo-tp2")])
def test_the_weights_arrive_at_every_step(trained):
    steps = read_steps(trained)
    assert len(steps) == 2
    check_arrival(steps)
    assert steps[0].sync["num_eager"] == steps[0].sync["num_buckets"]
    assert steps[1].sync["num_replayed"] == steps[1].sync["num_buckets"]
    reports = reports_of(trained)
    assert len(reports) == len(steps) + 1
    for step, report in zip(steps, reports[1:], strict=True):
        for name in ("num_buckets", "num_replayed", "num_eager", "num_pulled"):
            assert step.metrics[f"weight_sync/{name}"] == report[name]
        assert step.metrics["weight_sync/sync_s"] == pytest.approx(report["seconds"]["sync"])
        assert step.metrics["critic/grad_norm"] > 0, "the critic trains beside the actor"
    assert "manifest check:" not in (trained / "run.log").read_text()


FSDP1 = Run(
    "compiled",
    workers=2,
    tp=2,
    overrides=("actor_rollout_ref.actor.strategy=fsdp", "trainer.total_training_steps=3"),
    variables=(*FINDING_TESTS, "VERL_USE_EXTERNAL_MODULES=support.fsdp1_on_cpu"),
)


@pytest.mark.slow
@run([FSDP1], ids=["fsdp1"])
def test_parameters_of_fsdp1_are_read_where_they_are(trained):
    steps, reports = read_steps(trained), reports_of(trained)
    assert len(steps) == 3
    check_arrival(steps)
    pulled = [report["num_pulled"] / report["num_buckets"] for report in reports]
    assert pulled == [0, 1, 1, 1], "the first sync is exported, and compared"


REPLICAS = Run(
    "compiled",
    workers=2,
    architecture="qwen3_moe",
    overrides=("trainer.total_training_steps=3",),
    variables=(
        *LOSING,
        "SGLANG_EXTERNAL_MODEL_PACKAGE=support.unplannable",
        "RAY_DEDUP_LOGS=0",  # both replicas say the same
    ),
)


@pytest.mark.slow
@run([REPLICAS], ids=["replicas"])
def test_weights_reach_two_replicas_and_losses_show(trained):
    *steps, last = read_steps(trained)
    assert len(steps) == 2
    check_arrival(steps)
    assert not last.arrived
    assert len(reports_of(trained)) == REPLICAS.workers * (len(steps) + 2)


@pytest.mark.slow
@run([REPLICAS], ids=["replicas"])
def test_reasons_for_eager_syncs_reach_the_log(trained):
    """One warning and one line per sync of a replica; the tracker has the number of buckets."""
    steps, log = read_steps(trained), (trained / "run.log").read_text()
    eager = [step.metrics["weight_sync/num_eager"] for step in steps]
    assert eager[0] == eager[2] > eager[1] == 0, "the second step's was lost"
    warnings = [line for line in log.splitlines() if "slower than the load plan" in line]
    assert len(warnings) == REPLICAS.workers, warnings
    for warning in warnings:
        assert "WARNING" in warning and "Python reads the data of" in warning
    for replica in range(REPLICAS.workers):
        reported = [row for row in reports_of(trained) if row["replica"] == replica]
        assert log.count(f"weight sync: compiled, replica {replica}, version") == len(reported)


BACKEND = "actor_rollout_ref.rollout.checkpoint_engine"
OTHER_ENGINE = (
    *SEPARATE,
    f"{BACKEND}.backend=file",
    f"+{BACKEND}.engine_kwargs.file.folder={{folder}}",
    f"{BACKEND}.custom_backend_module=support.file_backend",
)


@pytest.mark.slow
@run([Run("compiled", overrides=OTHER_ENGINE, variables=FINDING_TESTS)], ids=["file"])
def test_another_checkpoint_engine_delivers_as_verl_does(trained):
    """Of a backend that hands them over as they come in, such as `nccl`; the log says so."""
    log = (trained / "run.log").read_text()
    steps = [Step(row["data"], {}) for row in read_metrics(trained)]
    assert [step.arrived for step in steps] == [True, True], [step.metrics for step in steps]
    assert "checkpoint_engine.backend='file' delivers the weights tensor by tensor" in log
    assert not (trained / "syncs.jsonl").exists(), "no sync was ours"


@pytest.mark.slow
@run([Run("", overrides=("actor_rollout_ref.rollout.multi_stage_wake_up=False",))], ids=["verl"])
def test_without_a_preset_verls_sync_is_unchanged(trained):
    """One stage is verl's default."""
    steps = [Step(row["data"], {}) for row in read_metrics(trained)]
    assert [step.arrived for step in steps] == [True, True], [step.metrics for step in steps]
    assert not any(name.startswith("weight_sync/") for name in steps[-1].metrics)
    log = (trained / "run.log").read_text()
    assert "weight sync" not in log and "verl_sglang_sync." not in log


@pytest.mark.slow
@run(
    [
        pytest.param(Run("flattened", overrides=MERGED_LORA), id="colocated"),
        pytest.param(Run("disaggregated", overrides=(*MERGED_LORA, *SEPARATE)), id="disaggregated"),
    ]
)
def test_merged_adapters_arrive(trained, request):
    """verl takes them out of its weights again when the export is through; without them the
    correlation is about 0. Each sync is one line at verl's default log level."""
    log = (trained / "run.log").read_text()
    lines = re.findall(r"weight sync: [\w/]+, (?:replica|version)", log)
    assert len(lines) == len(reports_of(trained)) > 0
    for step in read_steps(trained):
        if request.node.callspec.id == "colocated":
            assert "resume_weights_and_kv_cache" in step.sync["seconds"], "one stage"
        assert step.metrics["actor/grad_norm"] > 0.1, "the adapters must have moved"
        pearson = step.metrics["training/rollout_actor_probs_pearson_corr"]
        assert pearson > MIN_PEARSON_LORA, step.metrics


LOST_ADAPTER = (*LOSING, "SGLANG_EXTERNAL_MODEL_PACKAGE=support.unpinned")


@pytest.mark.slow
@run(
    [
        pytest.param(Run("compiled", overrides=ADAPTER, variables=LOST_ADAPTER), id="colocated"),
        pytest.param(
            Run("disaggregated", overrides=(*ADAPTER, *SEPARATE), variables=LOST_ADAPTER),
            id="disaggregated",
        ),
    ]
)
def test_an_adapter_arrives_unmerged_and_losses_show(trained):
    """The base weights come once. The first step's adapter is zero, the second's is not, and the
    third step samples with that one, because the next was lost.
    """
    *steps, last = read_steps(trained)
    assert len(steps) == 2
    assert all(step.arrived for step in steps), [step.metrics for step in steps]
    assert not last.arrived
    base, *adapters = reports_of(trained)
    assert base["num_buckets"] == 2 and base["seconds"]["load_adapter"] > 0
    assert {report["num_tensors"] for report in adapters} == {28, 0}, "the adapter's, or nothing"
    for report in adapters[:1]:
        assert 0 < report["payload_bytes"] < base["payload_bytes"] / 5
