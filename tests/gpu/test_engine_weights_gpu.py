"""On a real GPU: IPC handles, torch_memory_saver and CUDA graphs; the weights arrive bit for bit.

The engine sleeps with verl's settings (memory saver and host backup) around every sync.
"""

import pytest

from support.served import served
from support.sync_checks import MODES, STAGED, Syncs, check_mode, check_pulled
from support.trainer import ON_GPUS


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tp", [1, 2])
def test_sync_is_bit_exact_on_the_gpu(architecture, tp, tmp_path):
    with (
        served(tmp_path, tp=tp, architecture=architecture, device="cuda") as engine,
        engine.ranks(backend="cpu:gloo,cuda:nccl", **ON_GPUS) as ranks,  # as verl's ranks have it
    ):
        for mode in MODES:
            check_mode(engine, ranks, mode)
        syncs = Syncs([engine], ranks)
        syncs(**STAGED)
        for export in ("kept", "mapped"):
            check_pulled(syncs(export), [False, True, True, True])
            syncs(export, moves_after=3)
        check_pulled(syncs("offloaded"), [False, True, True, True], is_offloaded=True)
        for way in syncs.sharded:
            assert all(last["num_exchanged"] == last["num_buckets"] for last in way[-1])
        if tp > 1:
            syncs("sharded", fails_before=2, **STAGED)
        assert engine.lives
