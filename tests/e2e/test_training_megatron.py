"""verl trains with Megatron on the CPU, tensor and sequence parallel; the weights arrive in SGLang.

Transformer Engine's layers are stand-ins in plain torch, which on GPUs, too, `test_training_gpu`
and `benchmarks/grpo_step.py` train with where Transformer Engine is not installed.
"""

import json
from dataclasses import dataclass
from unittest import mock

import pytest
from benchmarks import gpu_memory, grpo_step
from tiny_assets import make_assets

from support.megatron_trainer import ENVIRONMENT
from support.settings import ENGINE_ON_A_CPU, MEGATRON_BRIDGE
from support.training import LIMIT_S

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ON_A_CPU = (
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
    *ENGINE_ON_A_CPU,
    "trainer.device=cpu",
    "+ray_kwargs.ray_init.num_gpus=2",
    "ray_kwargs.ray_init.num_cpus=12",
)
MAX_PROBS_DIFF, MIN_PEARSON = 0.01, 0.995  # bfloat16 on both sides
NUM_STEPS = 2


@dataclass(frozen=True)
class MegatronRun:
    """A run of the recipe for Megatron, TP 2."""

    def prepare(self, folder):
        make_assets(folder)
        (folder / "test.parquet").write_bytes((folder / "val.parquet").read_bytes())

    def train(self, folder, preloaded):
        sizes = {"GPUS": 2, "ROLLOUT_TP": 2, "TRAIN_TP": 2, "TRAIN_EP": 1}
        variables = {**ENVIRONMENT, "OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
        overrides = (*ON_A_CPU, *MEGATRON_BRIDGE)
        options = {
            "recipe": grpo_step.MEGATRON_RECIPE,
            "sizes": sizes | variables | preloaded,
            "limit_s": LIMIT_S,
        }
        with mock.patch.object(gpu_memory, "used_bytes", lambda gpus: [0 for _ in gpus]):
            grpo_step.run_arm("compiled", folder, NUM_STEPS, overrides, **options)


@pytest.mark.parametrize("trained", [MegatronRun()], indirect=True, ids=["tp2"])
def test_the_weights_arrive_at_every_step(trained):
    rows = (trained / "metrics-compiled.jsonl").read_text().splitlines()
    steps = [json.loads(row)["data"] for row in rows]
    assert len(steps) == NUM_STEPS
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < MAX_PROBS_DIFF, step
        assert step["training/rollout_actor_probs_pearson_corr"] > MIN_PEARSON, step
        assert step["actor/grad_norm"] > 0.01, "the weights must have moved"
