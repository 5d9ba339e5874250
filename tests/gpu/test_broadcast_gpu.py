"""On two real GPUs: a trainer on one broadcasts over NCCL to an engine on the other, bit-exact."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_assets import make_assets

from support.broadcast_steps import ONE_REPLICA, syncs_to_one_replica
from support.engine_hash import HASH_LOADER
from support.sglang_server import sglang_server
from support.trainer import ON_GPUS, run_trainer

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        NUM_GPUS < 2, reason=f"needs 2 NVIDIA GPUs: NCCL between them; this machine has {NUM_GPUS}"
    ),
]


def test_broadcast_syncs_are_bit_exact_over_nccl(tmp_path: Path) -> None:
    make_assets(tmp_path, architecture="qwen3_moe")
    model = tmp_path / "model"
    with sglang_server(
        model, tmp_path, device="cuda", loaders=(HASH_LOADER,), extra=("--base-gpu-id", "1")
    ) as server:
        (outcome,) = run_trainer(
            syncs_to_one_replica,
            tmp_path,
            str(model),
            str(tmp_path),
            server.url,
            urls=[server.url],
            device="cuda",
            environment=ON_GPUS,
        )
        check_syncs_to_one_replica(outcome.result, outcome.error)
        assert server.process.poll() is None
        log = server.log.read_text()
    assert re.search(r"sync: [1-9]\d* buckets replayed, 0 loaded eagerly", log)


def check_syncs_to_one_replica(seen: Any, error: str | None) -> None:
    """Eager and compiled leave the same bytes, and those of the checkpoint where it was sent."""
    assert error is None, error
    after = [sync["hashes"] for sync in seen["syncs"]]
    by_scale = {1.0: seen["reference"], 0.5: after[0], 2.0: after[3]}
    assert len({str(hashes) for hashes in by_scale.values()}) == 3
    scales = [*(scale for scale, _ in ONE_REPLICA), 0.5, 1.0]
    assert after == [by_scale[scale] for scale in scales]
    assert all(sync["report"]["num_buckets"] > 2 for sync in seen["syncs"])
    # one group for each mode, kept until the failed sync
    assert [sync["num_formed"] for sync in seen["syncs"]] == [1, 1, 1, 1, 1, 2, 1]
    assert "TP rank 0: Traceback" in seen["error"]
    assert seen["seconds"] < 30
