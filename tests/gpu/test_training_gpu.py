"""Real training by verl's own trainers on GPUs, a row a cell: the weights arrive at every step.

    pytest -m gpu -rP tests/gpu/test_training_gpu.py     # prints the seconds of each cell

A cell takes two minutes, most of them imports; all but `QUICK` are marked slow.

The engine computes in bfloat16 with kernels of its own, so the probabilities agree only to a few
percent; weights that did not arrive leave a correlation of about a half.
"""

import json
from dataclasses import dataclass, field

import pytest
from benchmarks import grpo_step
from tiny_assets import make_assets

from support.forks import python_path
from support.served_models import make_model
from support.settings import MEGATRON_BRIDGE

NUM_STEPS = 3
MAX_PROBS_DIFF = 0.05
MIN_PEARSON = 0.99
MIN_PEARSON_FP8 = 0.95

COMMON = (
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    # room for the runs beside this one: what they take while an engine starts counts as its own
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
    "+actor_rollout_ref.rollout.engine_kwargs.sglang.max_total_tokens=65536",
)
FSDP1 = ("actor_rollout_ref.actor.strategy=fsdp",)
OFFLOAD = ("actor_rollout_ref.actor.fsdp_config.param_offload=True",)
ONE_STAGE = ("actor_rollout_ref.rollout.multi_stage_wake_up=False",)
FP8 = ("actor_rollout_ref.rollout.quantization=fp8",)
LORA = (
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=32",
    "actor_rollout_ref.model.target_modules=all-linear",
)
MERGED = (
    *LORA,
    "actor_rollout_ref.model.lora.merge=True",
    "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",
)
SEPARATE = (
    "trainer.v1.separate_async.num_warmup_batches=0",  # every batch is sampled after a sync
)
SENT = ("actor_rollout_ref.rollout.custom.weight_sync.routes=[exchange]",)
APART = {
    "tp": 1,
    "preset": "disaggregated",
    "recipe": grpo_step.SEPARATE_RECIPE,
    "sizes": {"TRAINER_GPUS": 1, "ROLLOUT_GPUS": 1, "SYNC_EVERY": 1},
}

COLOCATE_ASYNC = (
    "trainer.v1.trainer_mode=colocate_async",
    "trainer.v1.colocate_async.num_warmup_batches=0",
)
HYBRID = (
    *SEPARATE,
    "actor_rollout_ref.hybrid_engine=True",
    "trainer.test_freq=1",  # verl syncs its colocated replicas only to validate
)
SWITCHING = (
    *SEPARATE,
    "actor_rollout_ref.hybrid_engine=True",
    "trainer.v1.separate_async.hybrid_rollout.enable_switch=True",
    "trainer.v1.separate_async.hybrid_rollout.switch_threshold_ratio=1.0",
)
MEGATRON = {
    "recipe": grpo_step.MEGATRON_RECIPE,
    "sizes": {"TRAIN_TP": 2, "TRAIN_EP": 1},
}


@dataclass(frozen=True)
class Cell:
    """One training run.

    Attributes:
        overrides: of verl's settings, on top of the recipe's.
        gpus: number of the run's GPUs.
        tp: of an engine; `gpus / tp` replicas.
        preset: `+weight_sync`.
        recipe: in `recipes/`.
        sizes: more of the recipe's environment.
        architecture: of the model.
        route: the count of a report that is all buckets from the third sync on; None: some export.
        hybrid: trainer GPUs have replicas too, which verl syncs when it needs them.
        pearson: at least this correlation of the probabilities.
    """

    overrides: tuple[str, ...] = ()
    gpus: int = 2
    tp: int = 2
    preset: str = "compiled"
    recipe: str = grpo_step.FSDP_RECIPE
    sizes: dict[str, int] = field(default_factory=dict)
    architecture: str = "qwen3"
    route: str | None = "num_pulled"
    hybrid: bool = False
    pearson: float = MIN_PEARSON


CELLS = {
    "fsdp2-tp1": Cell(gpus=1, tp=1),
    "fsdp1-tp1-flattened": Cell(FSDP1, gpus=1, tp=1, preset="flattened", route=None),
    "fp8-tp1": Cell(FP8, gpus=1, tp=1, route="num_replayed", pearson=MIN_PEARSON_FP8),
    "adapter-tp1": Cell(LORA, gpus=1, tp=1, route=None),
    "fsdp2-tp2": Cell(),
    "fsdp2-tp1x2": Cell(tp=1),
    "fsdp2-tp2-one-stage": Cell(ONE_STAGE),
    "fsdp2-offload-tp2": Cell(OFFLOAD),
    "fsdp2-offload-tp1x2-one-stage": Cell((*OFFLOAD, *ONE_STAGE), tp=1),
    "fsdp1-tp2": Cell(FSDP1),
    "fsdp1-tp1x2-one-stage": Cell((*FSDP1, *ONE_STAGE), tp=1),
    "fsdp1-offload-tp2": Cell((*FSDP1, *OFFLOAD)),
    "ppo-tp2": Cell(recipe=grpo_step.PPO_RECIPE),
    "merged-lora-tp2": Cell(MERGED, route=None),
    "merged-lora-offload-tp1": Cell((*MERGED, *OFFLOAD), gpus=1, tp=1, route=None),
    "adapter-tp2": Cell(LORA, route=None),
    "moe-tp2": Cell(architecture="qwen3_moe"),
    "fp8-tp2": Cell(FP8, route="num_replayed", pearson=MIN_PEARSON_FP8),
    "megatron-tp2": Cell(route="num_replayed", **MEGATRON),
    "megatron-bridge-tp2": Cell(MEGATRON_BRIDGE, route="num_replayed", **MEGATRON),
    "separate-async": Cell(SEPARATE, **APART),
    "colocate-async": Cell(COLOCATE_ASYNC, gpus=1, tp=1),
    "separate-async-hybrid": Cell(HYBRID, hybrid=True, **APART),
    "separate-async-switching": Cell(SWITCHING, hybrid=True, **APART),
    "separate-async-sent": Cell((*SENT, *SEPARATE), route="num_sent", **APART),
    "separate-async-fp8": Cell(
        (*FP8, *SEPARATE), route="num_replayed", pearson=MIN_PEARSON_FP8, **APART
    ),
    "separate-async-merged-lora": Cell((*MERGED, *SEPARATE), route=None, **APART),
}


@pytest.fixture(autouse=True)
def sglangs_variables(monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_JIT_DEEPGEMM", "0")  # which needs a CUDA compiler
    # runs beside each other do not fill both GPUs alike
    monkeypatch.setenv("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")


QUICK = ("fsdp2-tp2", "fsdp1-tp2", "separate-async", "fp8-tp1")


def marks(name):
    return [pytest.mark.gpu(CELLS[name].gpus), *([] if name in QUICK else [pytest.mark.slow])]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CELLS])
def test_the_weights_arrive(name, tmp_path):
    cell = CELLS[name]
    steps, reports = train(cell, tmp_path)
    print_row(name, steps, reports)
    for step in steps:
        assert step["training/rollout_actor_probs_pearson_corr"] > cell.pearson, step
        assert step["actor/grad_norm"] > 0.01, "the weights must have moved"
        if cell.pearson == MIN_PEARSON:
            assert step["training/rollout_probs_diff_max"] < MAX_PROBS_DIFF
    if cell.hybrid:
        standalone = [report for report in reports if report["replica"] is None]
        assert len(reports) > len(standalone), "no colocated replica was synced"
    else:
        standalone = reports
    assert len(standalone) == (NUM_STEPS + 1) * (
        1 if cell.preset == "disaggregated" else cell.gpus // cell.tp
    )
    if cell.route is not None:
        last = reports[-1]
        assert last[cell.route] == last["num_buckets"] > 0, last
        if cell.route == "num_pulled":
            is_offloaded = OFFLOAD[0] in cell.overrides
            assert (last["host_memory_bytes"] > 0) == is_offloaded, last


@pytest.mark.slow
def test_a_lost_adapter_fails_the_proof(tmp_path, monkeypatch):
    """The control of `adapter-tp1`, as `tests/e2e/test_training_cpu.py` has it: the last step
    samples with the adapter of the step before, because its own was lost.
    """
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "support.drop_sync")
    monkeypatch.setenv("PYTHONPATH", python_path())
    steps, reports = train(Cell(LORA, gpus=1, tp=1), tmp_path)
    print_row("adapter-tp1, one lost", steps, reports)
    correlations = [step["training/rollout_actor_probs_pearson_corr"] for step in steps]
    assert min(correlations[:-1]) > MIN_PEARSON > correlations[-1], correlations
    assert 0 in {report["num_tensors"] for report in reports[1:]}, "no adapter was lost"


def print_row(name, steps, reports):
    """Seconds of the last step and of its sync, and by which route the weights came."""
    last, step = reports[-1], steps[-1]
    counts = {key: value for key, value in last.items() if key.startswith("num_") and value}
    seconds = {key: step[f"timing_s/{key}"] for key in ("step", "update_weights")}
    print(name, seconds, last["seconds"]["sync"], counts, last["eager_reason"])


def train(cell, folder):
    """Some steps of a tiny model: verl's metrics, and the reports of the syncs."""
    make_assets(folder, architecture=cell.architecture)
    if FP8[0] in cell.overrides:
        make_model("qwen3", folder / "model")
    (folder / "test.parquet").write_bytes((folder / "val.parquet").read_bytes())
    steps, _ = grpo_step.run_arm(
        cell.preset,
        folder,
        NUM_STEPS,
        (*COMMON, *cell.overrides),
        recipe=cell.recipe,
        sizes={"GPUS": cell.gpus, "ROLLOUT_TP": cell.tp, **cell.sizes},
    )
    assert len(steps) == NUM_STEPS
    reports = (folder / f"syncs-{cell.preset}.jsonl").read_text().splitlines()
    return steps, [json.loads(line) for line in reports]
