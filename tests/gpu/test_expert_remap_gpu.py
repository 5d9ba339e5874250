"""On two real GPUs: SGLang's EPLB moves experts between two syncs, and no sync is wrong after it.

The engine rebalances by itself, after the tokens that it generated; `tests/contract` shows the same
of SGLang's map alone, on a CPU.
"""

import time

import pytest

from support.http_requests import generate
from support.served import served
from support.served_models import checkpoint_weights, make_model
from support.trainer import ON_GPUS, report_of_cycle

NUM_ITERATIONS = 20
EXTRA = (
    *("--ep-size", "2", "--enable-eplb", "--ep-num-redundant-experts", "2"),
    # Without graphs each token is one iteration that the recorder counts.
    *("--eplb-rebalance-num-iterations", str(NUM_ITERATIONS), "--disable-cuda-graph"),
    *("--expert-distribution-recorder-buffer-size", str(NUM_ITERATIONS)),
    *("--moe-runner-backend", "triton", "--log-level", "info"),
)
pytestmark = pytest.mark.gpu(2)


REBALANCED = "[EPLBManager] rebalance end"
MODEL = "qwen3-moe"


def sync(rank, mode, scale):
    weights = checkpoint_weights(MODEL, rank.folder / "model", rank.device)
    scaled = [(name, tensor * scale) for name, tensor in weights]
    return report_of_cycle(rank.kept_manager(mode), scaled, "other")


def test_after_a_rebalancing_a_new_plan_is_right(tmp_path):
    make_model(MODEL, tmp_path / "model")
    options = {"device": "cuda", "extra": EXTRA, "host_backup": "auto"}
    with served(tmp_path, tp=2, **options) as engine, engine.ranks(**ON_GPUS) as ranks:
        *_, last = syncs(engine, ranks, "compiled", 1.0, 0.5, 1.0)
        assert last[1]["num_replayed"] == last[1]["num_buckets"], last[1]["eager_reason"]
        generate(engine.url, NUM_ITERATIONS + 5)  # it rebalances after so many tokens
        deadline = time.monotonic() + 30
        while REBALANCED not in engine.log:
            assert time.monotonic() < deadline, "the engine did not rebalance its experts"
            time.sleep(0.2)
        ranks.run(forget)
        (first, made), (second, _), (again, replayed) = syncs(
            engine, ranks, "compiled", 1.0, 0.5, 1.0
        )
        assert made["num_replayed"] == 0
        assert "expert_map was" in made["eager_reason"]
        assert replayed["num_replayed"] == replayed["num_buckets"], replayed["eager_reason"]
        assert first == again != last[0], "else the experts are where they were"
        eager = [hashes for hashes, _ in syncs(engine, ranks, "flattened", 0.5, 1.0)]
        assert eager == [second, first]
        assert engine.lives


def forget(rank):
    """The next sync is by a new manager."""
    rank.kept.clear()


def syncs(engine, ranks, mode, *scales):
    """What the engine has after each, and the first rank's report."""
    seen = []
    for scale in scales:
        report = ranks.run(sync, mode, scale)[0]
        seen.append((engine.hashes(), report))
    return seen
