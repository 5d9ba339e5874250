"""Real verl training on the CPU: GRPO and PPO, TP 1 and 2, two replicas; the weights arrive.

The engine starts from random weights (`load_format=dummy`), both sides compute in float32, so the
probabilities of the sampled tokens agree only if every sync arrived. One run drops a sync on
purpose: the same check must fail there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from quickstart import Step, read_metrics, read_steps, run_recipe
from rich.console import Console
from tiny_assets import make_assets

from support.forks import TESTS
from support.settings import SEPARATE

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
MIN_PEARSON_LORA = 0.999
"""The merged weights are rounded to bfloat16, the trainer's adapters are not."""


@dataclass(frozen=True)
class Run:
    """One training run; `workers / tp` replicas."""

    preset: str
    workers: int = 1
    tp: int = 1
    architecture: str = "qwen3"
    tied: bool = False
    overrides: tuple[str, ...] = ()


def train(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train two steps, or more by the run's overrides, at verl's default log level."""
    make_assets(folder, architecture=run.architecture, tied=run.tied)
    monkeypatch.setenv("WORKERS", str(run.workers))
    monkeypatch.setenv("ROLLOUT_TP", str(run.tp))
    if SEPARATE[0] in run.overrides:  # see recipes/grpo_separate_async_gpu.sh
        monkeypatch.setenv("VERL_LOGGING_LEVEL", "WARN")
    overrides = (override.format(folder=folder) for override in run.overrides)
    status = run_recipe(folder, run.preset, *overrides, console=Console(quiet=True))
    assert status == 0, (folder / "run.log").read_text()[-6000:]


def check_arrival(steps: list[Step]) -> None:
    for step in steps:
        assert step.arrived, step.metrics
        assert step.metrics["actor/grad_norm"] > 0.1, "the weights must have moved"
        assert step.sync["num_buckets"] >= 1


def reports_of(folder: Path) -> list[dict[str, Any]]:
    """Of all syncs and replicas; the first sync precedes the first step, each step ends in one."""
    return [json.loads(line) for line in (folder / "syncs.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            Run("compiled", workers=2, tp=2, tied=True),
            id="grpo-tp2-compiled",
            marks=pytest.mark.slow,
        ),
        pytest.param(Run("compiled", overrides=PPO), id="ppo-tp1-compiled"),
    ],
)
def test_the_weights_arrive_at_every_step(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(run, tmp_path, monkeypatch)
    steps = read_steps(tmp_path)
    assert len(steps) == 2
    check_arrival(steps)
    assert steps[0].sync["num_eager"] == steps[0].sync["num_buckets"]
    assert steps[1].sync["num_replayed"] == steps[1].sync["num_buckets"]
    reports = reports_of(tmp_path)
    assert len(reports) == len(steps) + 1
    for step, report in zip(steps, reports[1:], strict=True):
        for name in ("num_buckets", "num_replayed", "num_eager", "num_pulled"):
            assert step.metrics[f"weight_sync/{name}"] == report[name]
        assert step.metrics["weight_sync/sync_s"] == pytest.approx(report["seconds"]["sync"])
        if run.overrides == PPO:
            assert step.metrics["critic/grad_norm"] > 0, "the critic trains beside the actor"
    assert "manifest check:" not in (tmp_path / "run.log").read_text()


@pytest.mark.slow
def test_why_no_sync_is_replayed_is_seen_at_verls_default_log_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning and one line per sync on the console; the tracker has the number of buckets."""
    monkeypatch.setenv("PYTHONPATH", TESTS)
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "support.unplannable")
    train(Run("compiled"), tmp_path, monkeypatch)
    steps = read_steps(tmp_path)
    check_arrival(steps)
    log, reports = (tmp_path / "run.log").read_text(), reports_of(tmp_path)
    for step in steps:
        assert step.metrics["weight_sync/num_eager"] == step.sync["num_buckets"]
    warnings = [line for line in log.splitlines() if "slower than the load plan" in line]
    assert len(warnings) == 1 and "WARNING" in warnings[0], warnings
    assert "Python reads the data of" in warnings[0]
    assert log.count("weight sync: compiled, replica 0, version") == len(reports)


@pytest.mark.slow
def test_weights_of_another_checkpoint_engine_arrive_verls_own_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a backend that hands them over as they come in, such as `nccl`; the log says so."""
    monkeypatch.setenv("PYTHONPATH", TESTS)
    backend = "actor_rollout_ref.rollout.checkpoint_engine"
    overrides = (
        *SEPARATE,
        f"{backend}.backend=file",
        f"+{backend}.engine_kwargs.file.folder={tmp_path}",
        f"{backend}.custom_backend_module=support.file_backend",
    )
    train(Run("compiled", overrides=overrides), tmp_path, monkeypatch)
    log = (tmp_path / "run.log").read_text()
    steps = [Step(row["data"], {}) for row in read_metrics(tmp_path)]
    assert [step.arrived for step in steps] == [True, True], [step.metrics for step in steps]
    assert "checkpoint_engine.backend='file' hands the weights over as they arrive" in log
    assert not (tmp_path / "syncs.jsonl").exists(), "no sync was ours"


@pytest.mark.slow
def test_without_a_preset_the_installed_plugin_leaves_verls_own_sync_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("actor_rollout_ref.rollout.multi_stage_wake_up=False",)  # verl's default
    train(Run(preset="", overrides=overrides), tmp_path, monkeypatch)
    steps = [Step(row["data"], {}) for row in read_metrics(tmp_path)]
    assert [step.arrived for step in steps] == [True, True], [step.metrics for step in steps]
    assert not any(name.startswith("weight_sync/") for name in steps[-1].metrics)
    log = (tmp_path / "run.log").read_text()
    assert "weight sync" not in log and "verl_sglang_sync." not in log


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(Run("flattened", overrides=MERGED_LORA), id="colocated"),
        pytest.param(Run("disaggregated", overrides=(*MERGED_LORA, *SEPARATE)), id="disaggregated"),
    ],
)
def test_merged_adapters_arrive(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl takes them out of its weights again when the export is through; without them the
    correlation is about 0."""
    train(run, tmp_path, monkeypatch)
    for step in read_steps(tmp_path):
        if run.preset == "flattened":
            assert "resume_weights_and_kv_cache" in step.sync["seconds"], "one stage"
        assert step.metrics["actor/grad_norm"] > 0.1, "the adapters must have moved"
        pearson = step.metrics["training/rollout_actor_probs_pearson_corr"]
        assert pearson > MIN_PEARSON_LORA, step.metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(Run("compiled", overrides=ADAPTER), id="colocated"),
        pytest.param(Run("disaggregated", overrides=(*ADAPTER, *SEPARATE)), id="disaggregated"),
    ],
)
def test_an_adapter_arrives_as_such_and_a_lost_one_fails_the_proof(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base weights come once. The first step's adapter is zero, the second's is not, and the
    third step samples with that one, because the next was lost.
    """
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "support.drop_sync")
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "support.unpinned")
    monkeypatch.setenv("PYTHONPATH", TESTS)
    train(run, tmp_path, monkeypatch)
    *steps, last = read_steps(tmp_path)
    assert len(steps) == 2
    assert all(step.arrived for step in steps), [step.metrics for step in steps]
    assert not last.arrived
    base, *adapters = reports_of(tmp_path)
    assert base["num_buckets"] == 2 and base["seconds"]["load_adapter"] > 0
    assert {report["num_tensors"] for report in adapters} == {28, 0}, "the adapter's, or nothing"
    for report in adapters[:1]:
        assert 0 < report["payload_bytes"] < base["payload_bytes"] / 5


@pytest.mark.slow
def test_weights_arrive_on_two_replicas_and_a_lost_sync_fails_the_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "support.drop_sync")
    monkeypatch.setenv("PYTHONPATH", TESTS)
    overrides = ("trainer.total_training_steps=3",)
    run = Run("bucketed", workers=2, architecture="qwen3_moe", overrides=overrides)
    train(run, tmp_path, monkeypatch)
    *steps, last = read_steps(tmp_path)
    assert len(steps) == 2
    check_arrival(steps)
    assert not last.arrived
    assert len(reports_of(tmp_path)) == 2 * (len(steps) + 2)
