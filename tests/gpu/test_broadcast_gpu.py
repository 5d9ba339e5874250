"""On real GPUs: a trainer gives its weights over NCCL to engines on other GPUs, bit-exact: by
broadcasts, and by sending what the engines read, also while another reads in place.
"""

import re

import pytest
from tiny_assets import make_assets

from support.engine_loaders import HOST_LOADER
from support.exports import doubled
from support.sender import Senders
from support.served import served
from support.trainer import ON_GPUS, Ranks

pytestmark = pytest.mark.gpu(2)

SCALES = (0.5, 2.0, 4.0, 0.5, 1.0)
VERLS_BACKEND = {"backend": "cpu:gloo,cuda:nccl", **ON_GPUS}


def test_broadcast_syncs_are_bit_exact_over_nccl(tmp_path):
    """Eager and compiled leave the same bytes, and those of the checkpoint where it was sent."""
    options = {"device": "cuda", "extra": ("--base-gpu-id", "1")}
    with (
        served(tmp_path, architecture="qwen3_moe", **options) as engine,
        engine.ranks(**ON_GPUS) as ranks,
    ):
        senders, known = Senders(ranks, [(engine.url, 1)]), {1.0: engine.hashes()}
        for scale, mode, num_formed in (
            (0.5, "flattened", 1),
            (1.0, "flattened", 1),
            (0.5, "compiled", 1),  # makes its plan, and replays it after that
            (2.0, "compiled", 1),
            (1.0, "compiled", 1),
            (None, "flattened", 1),
            (0.5, "flattened", 2),
            (1.0, "compiled", 1),  # one group for each mode, kept until the failed sync
        ):
            if scale is None:
                (seen,) = senders.attempt(lambda rank: doubled(rank.weights()))
                assert "TP rank 0: Traceback" in seen["error"]
                assert seen["seconds"] < 30
                continue
            report = senders.sync(scale, mode)
            assert (report["num_formed"], report["num_buckets"] > 2) == (num_formed, True)
            hashes = engine.hashes()
            assert hashes == known.setdefault(scale, hashes)
        assert len({str(hashes) for hashes in known.values()}) == 3
        assert engine.lives
        log = engine.log
    assert re.search(r"sync: [1-9]\d* buckets replayed, 0 loaded eagerly", log)


@pytest.mark.parametrize(("in_place", "route"), [(False, "num_sent"), (True, "num_pulled")])
def test_the_engine_reads_sent_or_mapped_memory(tmp_path, in_place, route):
    """The first syncs, which make the plan, are broadcast; the last leave what those did."""
    make_assets(tmp_path, architecture="qwen3_moe")
    options = {"device": "cuda", "extra": ("--base-gpu-id", "1")}
    with (
        served(tmp_path, **options) as engine,
        engine.ranks(**VERLS_BACKEND) as ranks,
    ):
        senders = Senders(
            ranks,
            [(engine.url, 1)],
            shards="mapped",
            routes=["pull", "exchange"] if in_place else ["exchange"],
        )
        seen = [("", engine.hashes())]
        for scale in SCALES:
            report = senders.sync(scale, "compiled")
            seen.append((report, engine.hashes()))
        assert engine.lives
    (_, reference), (first, half), *_, (again, half_again), (back, whole) = seen
    assert first[route] == 0
    assert half == half_again != whole == reference
    for report in (again, back):
        assert report[route] == report["num_buckets"] > 2


@pytest.mark.gpu(4)
def test_one_engine_pulls_while_another_is_sent_to(tmp_path):
    """Two trainer ranks and two engines; one of these is on another host, as far as it knows."""
    make_assets(tmp_path, architecture="qwen3_moe")
    options = {"model": tmp_path / "model", "device": "cuda", "loaders": (HOST_LOADER,)}
    with (
        served(tmp_path / "near", extra=("--base-gpu-id", "2"), **options) as near,
        served(tmp_path / "far", extra=("--base-gpu-id", "3"), **options) as far,
        Ranks(tmp_path, [near.url] * 2, **VERLS_BACKEND) as ranks,
    ):
        reference = near.hashes()
        far.ask(HOST_LOADER, "another host")
        senders = Senders(ranks, [(near.url, 1), (far.url, 1)], shards="mapped")
        for scale in SCALES:
            report = senders.sync(scale, "compiled")
            assert near.hashes() == far.hashes(), report
        assert report["num_pulled"] == report["num_sent"] == report["num_buckets"] > 2
        assert near.hashes() == reference
