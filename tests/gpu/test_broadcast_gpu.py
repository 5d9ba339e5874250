"""On two real GPUs: a trainer on one gives its weights over NCCL to an engine on the other,
bit-exact: by broadcasts, and by sending what the engine reads.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tiny_assets import make_assets

from support.broadcast_steps import ONE_REPLICA, sent_syncs, syncs_to_one_replica
from support.served import served
from support.trainer import ON_GPUS

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        NUM_GPUS < 2, reason=f"needs 2 NVIDIA GPUs: NCCL between them; this machine has {NUM_GPUS}"
    ),
]


def test_broadcast_syncs_are_bit_exact_over_nccl(tmp_path: Path) -> None:
    """Eager and compiled leave the same bytes, and those of the checkpoint where it was sent."""
    options = {"device": "cuda", "extra": ("--base-gpu-id", "1")}
    with served(tmp_path, architecture="qwen3_moe", **options) as engine:
        (seen,) = engine.run(syncs_to_one_replica, engine.url, **ON_GPUS)
        assert engine.lives
        log = engine.server.log.read_text()
    assert re.search(r"sync: [1-9]\d* buckets replayed, 0 loaded eagerly", log)
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


@pytest.mark.parametrize(("in_place", "route"), [(False, "num_sent"), (True, "num_pulled")])
def test_the_engine_reads_what_it_is_sent_or_the_trainers_memory(
    tmp_path: Path, in_place: bool, route: str
) -> None:
    """The first syncs, which make the plan, are broadcast; the last leave what those did."""
    make_assets(tmp_path, architecture="qwen3_moe")
    scales = (0.5, 2.0, 4.0, 0.5, 1.0)
    options = {"device": "cuda", "extra": ("--base-gpu-id", "1")}
    with served(tmp_path, **options) as engine:
        targets, sends = [(engine.url, 1)], [(scale, (0,)) for scale in scales]
        backend = "cpu:gloo,cuda:nccl"  # what verl's ranks have
        settings = {"read_in_place": in_place}
        (seen,) = engine.run(sent_syncs, targets, sends, settings, backend=backend, **ON_GPUS)
        assert engine.lives
    first, *_, again, back = seen["syncs"]
    assert first["report"][route] == 0
    assert first["hashes"] == again["hashes"] != back["hashes"] == seen["reference"]
    for sync in (again, back):
        assert sync["report"][route] == sync["report"]["num_buckets"] > 2
