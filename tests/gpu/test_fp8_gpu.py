"""On a real GPU: rollouts in fp8 get what verl's own quantiser makes, bit for bit, in every mode.

Server and quantiser are set up as verl does for `rollout.quantization=fp8`; what a CPU can show of
it is in `tests/contract/test_fp8.py`. The trainer's ranks hold shards, as FSDP2's do.
"""

from itertools import pairwise

import pytest
import torch

from contract.test_quantizer import FEW, SHAPES, check_kernel
from contract.tiny_architectures import random_weights, read_checkpoint
from support.exports import ShardedExport
from support.served import served
from support.served_models import case_of, make_model, model_override, quantizer
from support.sync_checks import STAGED
from support.trainer import ON_GPUS, report_of_cycle

EXTRA = ("--quantization", "fp8", "--load-format", "dummy")
SEEDS = (1, 2, 3, 4)
WAYS = {
    "eager": ("flattened", {}),
    "exported": ("compiled", {"routes": []}),
    "pulled": ("compiled", {}),
    "proven": ("compiled", {"prove_every_n_syncs": 2}),
    "exchanged": ("compiled", STAGED),
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_fp8_is_bit_exact(name, tp, tmp_path):
    make_model(name, tmp_path / "model")
    extra = (*EXTRA, "--json-model-override-args", model_override())
    with (
        served(tmp_path, tp=tp, device="cuda", extra=extra, host_backup="auto") as engine,
        engine.ranks(backend="cpu:gloo,cuda:nccl", **ON_GPUS) as ranks,
    ):
        eager = []
        for way, (mode, settings) in WAYS.items():
            if way == "exchanged" and tp == 1:
                continue
            ranks.run(begin, name, mode, settings)
            for number, seed in enumerate(SEEDS):
                report, hashes = ranks.run(sync, name, seed)[0], engine.hashes()
                if way == "eager":
                    eager.append(hashes)
                assert hashes == eager[number], (way, number)
                if way != "eager" and number:
                    check_report(way, number, report)
    assert any(key.endswith("weight_scale_inv") for key in eager[0][0])
    for before, after in pairwise(eager):
        for rank_before, rank_after in zip(before, after, strict=True):
            same = [key for key in rank_before if rank_before[key] == rank_after[key]]
            assert not [key for key in same if "proj" in key or "experts" in key]


def check_report(way, number, report):
    """After the first sync of each way."""
    assert report["num_replayed"] == report["num_buckets"], report["eager_reason"]
    if way == "exported":
        assert report["num_pulled"] == 0 and "export" in report["seconds"]
        return
    column = "num_exchanged" if way == "exchanged" else "num_pulled"
    assert report[column] == report["num_buckets"], "the engine quantises what it reads"
    assert "export" not in report["seconds"], "nobody gathered"
    if way == "pulled":
        assert report["staging_bytes"] == 0


def begin(rank, name, mode, settings):
    rank.kept["manager"] = rank.manager(mode, **settings)
    rank.kept["export"] = ShardedExport(weights_of(rank, name, 0))


def weights_of(rank, name, seed):
    checkpoint = read_checkpoint(case_of(name), rank.folder / "model")
    weights = random_weights(checkpoint, seed)
    return [(key, tensor.to(rank.device, torch.bfloat16)) for key, tensor in weights]


def sync(rank, name, seed):
    """Other weights every time, quantised by verl."""
    from verl_sglang_sync.verl.engine_format import quantized_by

    export = rank.kept["export"]
    export.write(weights_of(rank, name, seed))
    weights = quantized_by(export.reexport(), quantizer(), torch.bfloat16)
    return report_of_cycle(rank.kept["manager"], weights, str(seed))


@pytest.mark.gpu
def test_the_quantiser_gives_the_bits_of_verls():
    check_kernel((*SHAPES, *FEW, (4096, 1536)), torch.device("cuda", 0))
