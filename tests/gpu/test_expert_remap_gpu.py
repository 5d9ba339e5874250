"""On two real GPUs: SGLang's EPLB moves experts between two syncs, and no sync is wrong after it.

The engine rebalances by itself, after the tokens that it generated; `tests/contract` shows the same
of SGLang's map alone, on a CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.cycle_models import make_model
from support.gpu_steps import MODEL, REBALANCED, around_a_remap
from support.served import served
from support.trainer import ON_GPUS

NUM_GPUS = torch.cuda.device_count()
NUM_ITERATIONS = 20
EXTRA = (
    *("--ep-size", "2", "--enable-eplb", "--ep-num-redundant-experts", "2"),
    *("--eplb-rebalance-num-iterations", str(NUM_ITERATIONS), "--disable-cuda-graph"),
    *("--expert-distribution-recorder-buffer-size", str(NUM_ITERATIONS)),
    *("--moe-runner-backend", "triton", "--log-level", "info"),
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two NVIDIA GPUs: SGLang's EPLB"),
]


def test_a_rebalancing_ends_the_plan_and_the_next_one_is_right(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    make_model(MODEL, tmp_path / "model")
    options = {"device": "cuda", "extra": EXTRA, "host_backup": "auto"}
    with served(tmp_path, tp=2, **options) as engine:
        outcomes = engine.attempt(around_a_remap, NUM_ITERATIONS + 5, **ON_GPUS)
        log = engine.server.log.read_text(errors="replace")
        assert [outcome.error for outcome in outcomes] == [None, None], log[-4000:]
        assert engine.lives
    assert REBALANCED in log
    seen = outcomes[0].result
    learned, remapped, eager = (seen[key] for key in ("learned", "remapped", "eager"))
    last = learned[-1][1]
    assert last["num_replayed"] == last["num_buckets"], last["eager_reason"]
    (first_hashes, report), (second_hashes, _), (again_hashes, replayed) = remapped
    assert report["num_replayed"] == 0
    assert "expert_map was" in report["eager_reason"]
    assert replayed["num_replayed"] == replayed["num_buckets"], replayed["eager_reason"]
    assert first_hashes == again_hashes == eager[1][0]
    assert second_hashes == eager[0][0]
    assert first_hashes != learned[-1][0], "the experts are where they were"
