"""Real GRPO on one GPU with FSDP1, FSDP2, and rollouts in fp8: the weights arrive at every step.

The engine computes in bfloat16 with kernels of its own, so the probabilities agree only to a few
percent; weights that did not arrive leave a correlation of about a half.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import grpo_step
from tiny_assets import make_assets

from support.fp8_models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: FSDP1"),
]
MAX_PROBS_DIFF = 0.05
MIN_PEARSON = 0.99
MIN_PEARSON_FP8 = 0.95


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_the_weights_arrive(strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_assets(tmp_path)
    strategies = f"actor_rollout_ref.actor.strategy={strategy}"
    steps, reports = train("flattened", tmp_path, monkeypatch, strategies)
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < MAX_PROBS_DIFF
        assert step["training/rollout_actor_probs_pearson_corr"] > MIN_PEARSON
        assert step["actor/grad_norm"] > 0.01, "the weights must have moved"
    assert [report["mode"] for report in reports] == ["flattened"] * 3


def test_fp8_weights_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer computes in bfloat16, the engine with weights of 4 bits' precision."""
    monkeypatch.setenv("SGLANG_ENABLE_JIT_DEEPGEMM", "0")  # which needs a CUDA compiler
    make_assets(tmp_path)
    make_model("qwen3", tmp_path / "model")
    quantization = "actor_rollout_ref.rollout.quantization=fp8"
    steps, reports = train("compiled", tmp_path, monkeypatch, quantization)
    for step in steps:
        assert step["training/rollout_actor_probs_pearson_corr"] > MIN_PEARSON_FP8, step
        assert step["actor/grad_norm"] > 0.01, "the weights must have moved"
    first, *later = reports
    assert first["num_eager"] == first["num_buckets"]
    for report in later:
        assert report["num_replayed"] == report["num_buckets"], report["eager_reason"]


def train(
    arm: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Two steps of `folder`'s model: verl's metrics, and the reports of the syncs."""
    (folder / "test.parquet").write_bytes((folder / "val.parquet").read_bytes())
    common = (
        *grpo_step.OVERRIDES,
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
    )
    monkeypatch.setattr(grpo_step, "OVERRIDES", (*common, *overrides))
    steps, _ = grpo_step.run_arm(arm, folder, 2)
    assert len(steps) == 2
    reports = (folder / f"syncs-{arm}.jsonl").read_text().splitlines()
    return steps, [json.loads(line) for line in reports]
