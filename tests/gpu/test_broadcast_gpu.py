"""On two real GPUs: a trainer on one gives its weights over NCCL to an engine on the other,
bit-exact: by broadcasts, and by sending what the engine reads.
"""

import re

import pytest
from tiny_assets import make_assets

from support.exports import doubled
from support.sender import Senders
from support.served import served
from support.trainer import ON_GPUS

pytestmark = pytest.mark.gpu(2)


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
def test_the_engine_reads_what_it_is_sent_or_the_trainers_memory(tmp_path, in_place, route):
    """The first syncs, which make the plan, are broadcast; the last leave what those did."""
    make_assets(tmp_path, architecture="qwen3_moe")
    options = {"device": "cuda", "extra": ("--base-gpu-id", "1")}
    with (
        served(tmp_path, **options) as engine,
        engine.ranks(backend="cpu:gloo,cuda:nccl", **ON_GPUS) as ranks,  # what verl's ranks have
    ):
        senders = Senders(ranks, [(engine.url, 1)], shards="mapped", read_in_place=in_place)
        seen = [("", engine.hashes())]
        for scale in (0.5, 2.0, 4.0, 0.5, 1.0):
            report = senders.sync(scale, "compiled")
            seen.append((report, engine.hashes()))
        assert engine.lives
    (_, reference), (first, half), *_, (again, half_again), (back, whole) = seen
    assert first[route] == 0
    assert half == half_again != whole == reference
    for report in (again, back):
        assert report[route] == report["num_buckets"] > 2
