"""Seconds of a real GRPO step with verl's own sync and with ours, with random weights.

    python benchmarks/grpo_step.py --model qwen3-4b --steps 3 --json benchmarks/results/....json

Every arm is a full run of `recipes/grpo_fsdp_gpu.sh`, or of the recipe that `--recipe` names: same
data and seed. Without Transformer Engine Megatron trains with one of plain torch, and without
flash-attn critics use torch's attention (`STAND_INS`); the row says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from benchmarks.gpu_memory import MemorySamples  # noqa: E402
from verl_sglang_sync.commands.bench.model_shapes import MODELS  # noqa: E402
from verl_sglang_sync.commands.bench.results_file import (  # noqa: E402
    hardware,
    medians,
    print_table,
    write_results,
)

ARMS = {
    "native": "",
    **{preset: preset for preset in ("flattened", "compiled", "disaggregated")},
}
COLOCATED = ["native", "flattened", "compiled"]
LOG_TAIL = 20_000  # characters
ONE_GPU = {"GPUS": 1, "ROLLOUT_TP": 1}
TIMERS = ("step", "gen", "update_weights", "update_actor", "old_log_prob")
FSDP_RECIPE, MEGATRON_RECIPE = "grpo_fsdp_gpu.sh", "grpo_megatron_gpu.sh"
SEPARATE_RECIPE, PPO_RECIPE = "grpo_separate_async_gpu.sh", "ppo_fsdp_gpu.sh"
STAND_INS = {  # by recipe: a package that it needs, and what is imported where it is missing
    MEGATRON_RECIPE: ("transformer_engine", "support.megatron_stand_ins"),
    PPO_RECIPE: ("flash_attn", "support.sdpa_critic"),
}
FSDP_OVERRIDES = (
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
    "actor_rollout_ref.actor.use_torch_compile=False",
)
CRITIC_OVERRIDES = (
    "critic.use_dynamic_bsz=False",
    "critic.ppo_mini_batch_size=16",
    "critic.ppo_micro_batch_size_per_gpu=4",
    "critic.model.use_remove_padding=False",
    "+critic.model.override_config.attn_implementation=sdpa",
)
OVERRIDES_BY_RECIPE = {
    FSDP_RECIPE: FSDP_OVERRIDES,
    SEPARATE_RECIPE: FSDP_OVERRIDES,
    PPO_RECIPE: (*FSDP_OVERRIDES, *CRITIC_OVERRIDES),
    MEGATRON_RECIPE: (),
}
OVERRIDES = (
    "actor_rollout_ref.actor.use_dynamic_bsz=False",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",  # 16 samples on up to 4 GPUs
    "actor_rollout_ref.rollout.n=1",
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
    "actor_rollout_ref.rollout.max_num_seqs=64",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "actor_rollout_ref.rollout.load_format=dummy",
    "data.train_batch_size=16",
    "data.max_prompt_length=64",
    "data.max_response_length=16",
    "data.dataloader_num_workers=0",
    "data.filter_overlong_prompts=False",
    "reward.num_workers=1",
    f"reward.custom_reward_function.path={ROOT}/recipes/tiny_reward.py",
    "reward.custom_reward_function.name=compute_score",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "+ray_kwargs.ray_init.include_dashboard=False",  # where it cannot start, Ray waits a minute
    "trainer.logger=[console,file]",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.resume_mode=disable",
    "trainer.total_epochs=100",
)


def make_model(folder: Path, model: str) -> None:
    """Write random bf16 weights of the shape, a byte-level tokenizer and prompts."""
    import torch
    from tiny_assets import make_assets
    from transformers import AutoConfig, AutoModelForCausalLM

    make_assets(folder)
    (folder / "test.parquet").write_bytes((folder / "val.parquet").read_bytes())
    config = AutoConfig.for_model(**MODELS[model])
    torch.manual_seed(0)
    with torch.device("cuda"):
        weights = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for stale in (folder / "model").glob("*.safetensors"):
        stale.unlink()
    weights.to("cpu").save_pretrained(folder / "model")
    torch.cuda.empty_cache()  # the arms are other processes on the same GPU


def stand_in(recipe: str) -> str | None:
    """What the recipe is run with because a package that it needs is not installed."""
    package, module = STAND_INS.get(recipe, (None, None))
    return module if package and find_spec(package) is None else None


def run_arm(
    arm: str,
    folder: Path,
    steps: int,
    more: Sequence[str] = (),
    recipe: str = FSDP_RECIPE,
    sizes: Mapping[str, int | str] = ONE_GPU,
    limit_s: float | None = None,
) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """Train `steps` steps; return verl's metrics of each, and GPU memory over the last one.

    Args:
        arm: one of `ARMS`.
        folder: has the model and the data; gets logs, metrics and reports.
        steps: of training.
        more: overrides of verl's settings.
        recipe: in `recipes/`.
        sizes: variables of the recipe: how many GPUs, and so on.
        limit_s: the training is killed after so many seconds.

    Raises:
        RuntimeError: the training failed; the message has the end of its log.
        subprocess.TimeoutExpired: it was killed.
    """
    metrics = folder / f"metrics-{arm}.jsonl"
    for stale in (metrics, folder / f"syncs-{arm}.jsonl"):
        stale.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "MODEL": str(folder / "model"),
        "DATA": str(folder),
        **{name: str(size) for name, size in sizes.items()},
        "WEIGHT_SYNC": ARMS[arm],
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "RAY_ADDRESS": "local",  # not a cluster that runs beside it
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
    }
    if module := stand_in(recipe):
        found = (str(ROOT / "tests"), str(ROOT / "recipes"), os.environ.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, found))
        environment["VERL_USE_EXTERNAL_MODULES"] = module
    report = "actor_rollout_ref.rollout.custom.weight_sync.report_file"
    total = f"trainer.total_training_steps={steps}"
    overrides = [*OVERRIDES, *OVERRIDES_BY_RECIPE[recipe], total, *more]
    if ARMS[arm]:
        overrides.append(f"{report}={folder}/syncs-{arm}.jsonl")
    command = ["bash", str(ROOT / "recipes" / recipe), *overrides]

    def num_done() -> int:
        return metrics.read_text().count("\n") if metrics.exists() else 0

    path = folder / f"run-{arm}.log"
    with path.open("w") as log, MemorySamples(num_done) as memory:
        ended = subprocess.run(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=limit_s
        )
    if ended.returncode:
        raise RuntimeError(f"{recipe} failed:\n{path.read_text(errors='replace')[-LOG_TAIL:]}")
    data = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    return data, memory.of(steps - 1)


def stage_medians(folder: Path, arm: str) -> dict[str, float]:
    """Median seconds of the stages of our syncs, without the first; empty for verl's own."""
    reports = folder / f"syncs-{arm}.jsonl"
    if not reports.exists():
        return {}
    lines = reports.read_text().splitlines()
    return medians(json.loads(line)["seconds"] for line in lines[1:])


def row_of(
    arm: str, model: str, steps: list[dict[str, Any]], stages: dict[str, float]
) -> dict[str, Any]:
    """Medians over the steps after the first, which warms up; and the proof of arrival."""
    named = [name for name in TIMERS if f"timing_s/{name}" in steps[0]]
    timed = [{name: step[f"timing_s/{name}"] for name in named} for step in steps]
    return {
        "arm": arm,
        "model": model,
        "runs": len(steps) - 1,
        "median_s": {**medians(timed[1:]), **stages},
        "steps": timed,
        "rollout_probs_diff_max": [step["training/rollout_probs_diff_max"] for step in steps],
        "pearson": [step["training/rollout_actor_probs_pearson_corr"] for step in steps],
    }


def main() -> None:
    """Run all arms; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen3-4b")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1, help="of each engine, and of Megatron")
    parser.add_argument("--recipe", choices=OVERRIDES_BY_RECIPE, default=FSDP_RECIPE)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=COLOCATED)
    parser.add_argument("--folder", type=Path, default=Path("outputs/grpo_step"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="of verl's settings, for all arms")
    args = parser.parse_args()
    folder = args.folder.resolve()
    make_model(folder, args.model)
    rows = []
    sizes = {"GPUS": args.gpus, "ROLLOUT_TP": args.tp, "TRAIN_TP": args.tp, "TRAIN_EP": 1}
    if args.recipe == SEPARATE_RECIPE:  # one engine; every batch is sampled after a sync
        sizes |= {"TRAINER_GPUS": args.gpus - args.tp, "ROLLOUT_GPUS": args.tp, "SYNC_EVERY": 1}
        args.overrides.insert(0, "trainer.v1.separate_async.num_warmup_batches=0")
    for arm in args.arms:
        steps, memory = run_arm(arm, folder, args.steps, args.overrides, args.recipe, sizes)
        row = row_of(arm, args.model, steps, stage_medians(folder, arm))
        row["recipe"] = args.recipe
        row["stand_in"] = stand_in(args.recipe)
        rows.append({**row, "gpus": args.gpus, "tp": args.tp, "memory": memory})
        path = args.json or Path(f"benchmarks/results/grpo_step-{hardware()}.json")
        write_results(path, "grpo_step", rows)
    print_table(rows, TIMERS)


if __name__ == "__main__":
    main()
