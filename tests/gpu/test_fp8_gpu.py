"""On a real GPU: rollouts in fp8 get what verl's own quantiser makes, bit for bit, in every mode.

Server and quantiser are set up as verl does for `rollout.quantization=fp8`; what a CPU can show of
it is in `tests/contract/test_fp8.py`.
"""

from functools import partial
from itertools import pairwise

import pytest
import torch

from contract.tiny_architectures import random_weights, read_checkpoint
from support.served import served
from support.served_models import case_of, make_model, model_override, quantizer
from support.trainer import ON_GPUS, report_of_cycle

EXTRA = ("--quantization", "fp8", "--load-format", "dummy")
SEEDS = (1, 2, 3, 4)
WAYS = (
    ("flattened", {}),
    ("compiled", {}),
    ("compiled", {"prove_every_n_syncs": 2}),
)


@pytest.mark.parametrize(("name", "tp"), [("qwen3", 1), ("qwen3-moe", 1), ("qwen3-moe", 2)])
def test_fp8_is_bit_exact(name, tp, tmp_path):
    make_model(name, tmp_path / "model")
    extra = (*EXTRA, "--json-model-override-args", model_override())
    with (
        served(tmp_path, tp=tp, device="cuda", extra=extra, host_backup="auto") as engine,
        engine.ranks(**ON_GPUS) as ranks,
    ):
        eager = []
        for mode, settings in WAYS:
            ranks.run(begin, mode, settings)
            for number, seed in enumerate(SEEDS):
                report, hashes = ranks.run(sync, name, seed)[0], engine.hashes()
                if mode == "flattened":
                    eager.append(hashes)
                assert hashes == eager[number]
                if mode == "compiled" and not settings and number:
                    assert report["num_replayed"] == report["num_buckets"], report["eager_reason"]
                    assert report["num_pulled"] == 0, "what is sent is not in the trainer's memory"
    assert any(key.endswith("weight_scale_inv") for key in eager[0][0])
    for before, after in pairwise(eager):
        for rank_before, rank_after in zip(before, after, strict=True):
            same = [key for key in rank_before if rank_before[key] == rank_after[key]]
            assert not [key for key in same if "proj" in key or "experts" in key]


def begin(rank, mode, settings):
    rank.kept["manager"] = rank.manager(mode, **settings)


def sync(rank, name, seed):
    """Other weights every time, quantised by verl."""
    from verl_sglang_sync.sources.export import Reexport, transformed
    from verl_sglang_sync.verl.engine_format import quantized

    checkpoint = read_checkpoint(case_of(name), rank.folder / "model")
    quantize = partial(quantized, quantizer=quantizer(), dtype=torch.bfloat16)

    def export():
        for key, tensor in random_weights(checkpoint, seed):
            yield key, tensor.to(rank.device, torch.bfloat16)

    weights = transformed(Reexport(export), quantize, computes=True)
    return report_of_cycle(rank.kept["manager"], weights, str(seed))
