"""A LoRA adapter that a real TP 2 engine serves as such, replaced while its base weights stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_assets import make_assets

from support.adapter_steps import RANK, TARGETS, adapted, served_adapters
from support.served import served

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WITH_LORA = (
    *("--enable-lora", "--max-lora-rank", str(RANK), "--lora-target-modules", *TARGETS),
    *("--lora-backend", "torch_native", "--max-loras-per-batch", "2"),
)
WITHOUT_PINNED_MEMORY = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "support.unpinned"}


def test_an_adapter_is_served_and_replaced_and_one_that_does_not_fit_is_refused_by_name(
    tmp_path: Path,
) -> None:
    make_assets(tmp_path)
    first, second = (adapted(tmp_path / "model", seed) for seed in (1, 2))
    large = adapted(tmp_path / "model", 3, rank=2 * RANK)
    with served(tmp_path, tp=2, extra=WITH_LORA, variables=WITHOUT_PINNED_MEMORY) as engine:
        leader, other = engine.run(served_adapters, first, second, large)
    num_replayed, num_buckets = leader["replayed"]
    assert num_replayed == num_buckets > 0
    assert leader["base"] == leader["base again"]
    for name, expected in (
        ("base", first.base_log_probs),
        ("first", first.log_probs),
        ("second", second.log_probs),
        ("first again", first.log_probs),
        ("second again", second.log_probs),
    ):
        torch.testing.assert_close(leader[name], expected, atol=1e-4, rtol=0)
    for name, others in (("first", "base"), ("second", "base"), ("first", "second")):
        differences = (abs(a - b) for a, b in zip(leader[name], leader[others], strict=True))
        assert max(differences) > 0.01, f"{name} is no other than {others}"
    assert leader["without"] == [400, 400], "nobody is served without the adapter that it asks for"
    assert leader["error"] == other["error"]
    assert "stage 'load_adapter' failed" in leader["error"]
    assert str(2 * RANK) in leader["error"], leader["error"]
