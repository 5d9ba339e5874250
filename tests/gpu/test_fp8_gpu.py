"""On a real GPU: rollouts in fp8 get what verl's own quantiser makes, bit for bit, in every mode.

Server and quantiser are set up as verl does for `rollout.quantization=fp8`; what a CPU can show of
it is in `tests/contract/test_fp8.py`.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from support.fp8_models import make_model, model_override
from support.gpu_steps import quantized_syncs
from support.served import served
from support.trainer import ON_GPUS

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs an NVIDIA GPU: fp8 kernels"),
]
EXTRA = ("--quantization", "fp8", "--load-format", "dummy", "--disable-cuda-graph")


@pytest.mark.parametrize(("name", "tp"), [("qwen3", 1), ("qwen3-moe", 1), ("qwen3-moe", 2)])
def test_fp8_is_bit_exact(name: str, tp: int, tmp_path: Path) -> None:
    if tp > NUM_GPUS:
        pytest.skip(f"needs {tp} GPUs, this machine has {NUM_GPUS}")
    make_model(name, tmp_path / "model")
    extra = (*EXTRA, "--json-model-override-args", model_override())
    with served(tmp_path, tp=tp, device="cuda", extra=extra, host_backup="auto") as engine:
        flattened, *others = engine.run(quantized_syncs, name, **ON_GPUS)[0]
    eager = [hashes for hashes, _ in flattened]
    assert any(key.endswith("weight_scale_inv") for key in eager[0][0])
    for before, after in pairwise(eager):
        for rank_before, rank_after in zip(before, after, strict=True):
            same = [key for key in rank_before if rank_before[key] == rank_after[key]]
            assert not [key for key in same if "proj" in key or "experts" in key]
    for way in others:
        assert [hashes for hashes, _ in way] == eager
    for _, report in others[1][1:]:
        assert report["num_replayed"] == report["num_buckets"], report["eager_reason"]
        assert report["num_pulled"] == 0, "what is sent is not in the trainer's memory"
