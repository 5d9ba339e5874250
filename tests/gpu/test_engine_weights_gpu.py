"""On a real GPU: IPC handles, torch_memory_saver and CUDA graphs; the weights arrive bit for bit.

The engine sleeps with verl's settings (memory saver and host backup) around every sync.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_assets import make_assets

from support.engine_hash import HASH_LOADER
from support.engine_steps import MODES, exercise_engine
from support.sglang_server import sglang_server
from support.trainer import ON_GPUS, run_trainer

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs an NVIDIA GPU: CUDA IPC and memory saver"),
]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tp", [1, 2])
def test_sync_is_bit_exact_on_the_gpu(architecture: str, tp: int, tmp_path: Path) -> None:
    if tp > NUM_GPUS:
        pytest.skip(f"needs {tp} GPUs, this machine has {NUM_GPUS}")
    make_assets(tmp_path, architecture=architecture)
    model = tmp_path / "model"
    with sglang_server(model, tmp_path, tp=tp, device="cuda", loaders=(HASH_LOADER,)) as server:
        outcomes = run_trainer(
            exercise_engine,
            tmp_path,
            str(model),
            str(tmp_path),
            urls=[server.url],
            tp=tp,
            device="cuda",
            backend="gloo" if tp == 1 else "cpu:gloo,cuda:nccl",  # what verl's ranks have
            environment=ON_GPUS,
        )
        assert [outcome.error for outcome in outcomes] == [None] * tp
        seen = outcomes[0].result
        for mode in MODES:
            for before, after in zip(seen["reference"], seen[mode]["changed"], strict=True):
                assert not [name for name in before if before[name] == after[name]]
            assert seen[mode]["restored"] == seen["reference"]
            assert "TP rank 0" in seen[mode]["failure"]
            assert seen[mode]["recovered"] == seen["reference"]
        syncs = seen["syncs"]
        eager = [hashes for hashes, _ in syncs["eager"]]
        for compiled in syncs["compiled"]:
            assert [hashes for hashes, _ in compiled] == eager
            last = compiled[-1][1]
            assert last["num_replayed"] == last["num_buckets"]
        if tp > 1:
            ordered = syncs["compiled"][0][-1][1]
            assert ordered["num_arranged"] > 0
            assert ordered["sent_bytes"] < 0.6 * ordered["payload_bytes"]
        for sharded in syncs["sharded"]:
            assert [hashes for hashes, _ in sharded] == eager
            assert sharded[-1][1]["num_exchanged"] == sharded[-1][1]["num_buckets"]
        for pulled in syncs["pulled"]:
            assert [hashes for hashes, _ in pulled] == eager
            assert pulled[-1][1]["num_pulled"] == pulled[-1][1]["num_buckets"]
        for moved in syncs["moved"]:
            assert [hashes for hashes, _ in moved] == eager
        assert server.process.poll() is None
