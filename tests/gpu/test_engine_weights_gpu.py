"""On a real GPU: IPC handles, torch_memory_saver and CUDA graphs; the weights arrive bit for bit.

The engine sleeps with verl's settings (memory saver and host backup) around every sync.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.engine_steps import MODES, exercise_engine
from support.served import served
from support.sync_checks import check_syncs_in_a_row
from support.trainer import ON_GPUS

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
    with served(tmp_path, tp=tp, architecture=architecture, device="cuda") as engine:
        backend = "cpu:gloo,cuda:nccl"  # what verl's ranks have
        seen = engine.run(exercise_engine, backend=backend, **ON_GPUS)[0]
        assert engine.lives
    for mode in MODES:
        for before, after in zip(seen["reference"], seen[mode]["changed"], strict=True):
            assert not [name for name in before if before[name] == after[name]]
        assert seen[mode]["restored"] == seen[mode]["recovered"] == seen["reference"]
        assert "TP rank 0" in seen[mode]["refused"]
    check_syncs_in_a_row(seen["syncs"], tp)
