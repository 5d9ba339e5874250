"""verl trains with Megatron on the CPU, tensor and sequence parallel; the weights arrive in SGLang.

Transformer Engine's layers are stand-ins in plain torch, which on GPUs, too, `test_training_gpu`
and `benchmarks/grpo_step.py` train with where Transformer Engine is not installed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import gpu_memory, grpo_step
from tiny_assets import make_assets

from support.megatron_trainer import ENVIRONMENT
from support.megatron_training import train_beside_huggingface
from support.settings import MEGATRON_BRIDGE
from support.trainer import results_of, run_trainer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NO_ENGINE = "http://127.0.0.1:9"
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.sglang"
ON_A_CPU = (
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.rollout.enforce_eager=True",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
    f"+{ENGINE}.device=cpu",
    f"{ENGINE}.attention_backend=torch_native",
    f"+{ENGINE}.disable_overlap_schedule=True",
    f"+{ENGINE}.sleep_on_idle=True",
    f"+{ENGINE}.max_total_tokens=4096",
    f"+{ENGINE}.enable_memory_saver=False",
    "trainer.device=cpu",
    "+ray_kwargs.ray_init.num_gpus=2",
    "ray_kwargs.ray_init.num_cpus=12",
)
MAX_PROBS_DIFF, MIN_PEARSON = 0.01, 0.995  # bfloat16 on both sides
NUM_STEPS = 2


def test_the_layers_compute_what_hugging_faces_do(tmp_path: Path) -> None:
    """Of a model that mbridge builds; the training below has Megatron-Bridge's."""
    make_assets(tmp_path)
    ranks = run_trainer(
        train_beside_huggingface,
        tmp_path,
        str(tmp_path / "model"),
        urls=[NO_ENGINE],
        tp=2,
        environment=ENVIRONMENT,
    )
    for result in results_of(ranks):
        megatron, reference = result["megatron"], result["huggingface"]
        assert megatron["log_probs"] == pytest.approx(reference["log_probs"], abs=1e-5)
        assert megatron["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert megatron["norm"] == pytest.approx(reference["norm"], rel=1e-5)


def test_the_weights_arrive_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_assets(tmp_path)
    (tmp_path / "test.parquet").write_bytes((tmp_path / "val.parquet").read_bytes())
    monkeypatch.setattr(gpu_memory, "used_bytes", lambda gpus: [0 for _ in gpus])
    variables = {"OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    for name, value in {**ENVIRONMENT, **variables}.items():
        monkeypatch.setenv(name, value)
    steps, _ = grpo_step.run_arm(
        "compiled",
        tmp_path,
        NUM_STEPS,
        (*ON_A_CPU, *MEGATRON_BRIDGE),
        recipe=grpo_step.MEGATRON_RECIPE,
        sizes={"GPUS": 2, "ROLLOUT_TP": 2, "TRAIN_TP": 2, "TRAIN_EP": 1},
    )
    assert len(steps) == NUM_STEPS
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < MAX_PROBS_DIFF, step
        assert step["training/rollout_actor_probs_pearson_corr"] > MIN_PEARSON, step
        assert step["actor/grad_norm"] > 0.01, "the weights must have moved"
