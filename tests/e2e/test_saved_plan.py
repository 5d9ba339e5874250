"""A real engine whose first sync is not traced, or in part, and all of whose weights are right.

It restarts, or its layers have so many tensors that the load of most is inferred from some.
"""

import re

import pytest
from tiny_assets import make_assets

from sglang_loader.common.engine_settings import LOAD_PLANS_VARIABLE
from sglang_loader.common.session.messages import MAKING_PLAN, PROVING_SAVED_PLAN
from support.exports import ShardedExport
from support.served import served
from support.trainer import report_of_cycle

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SCALES = (0.5, 2.0, 1.0)


def _sync(rank, **settings):
    """Syncs of other weights each time, which the engine pulls from the second on."""
    manager = rank.manager("compiled", **settings)
    export = ShardedExport(rank.weights(), is_mappable=True)
    reports = []
    for scale in SCALES:
        export.write(rank.weights(scale))
        reports.append(report_of_cycle(manager, export.reexport(), str(scale)))
    return reports


def test_a_restarted_engine_proves_its_saved_plan(tmp_path):
    plans, reasons = tmp_path / "load-plans", []
    variables = {LOAD_PLANS_VARIABLE: str(plans)}
    for life in range(2):
        with (
            served(tmp_path, tp=2, architecture="qwen3_moe", variables=variables) as engine,
            engine.ranks() as ranks,
        ):
            reference = engine.hashes()
            for first, *later in ranks.run(_sync):
                assert first["is_proven"], "by the proof of the route"
                assert all(report["num_pulled"] == report["num_buckets"] for report in later)
                reasons.append(first["eager_reason"])
            assert engine.hashes() == reference, f"life {life}"
    assert reasons == [MAKING_PLAN] * 2 + [PROVING_SAVED_PLAN] * 2
    assert len(list(plans.iterdir())) == 2, "one of each TP rank"


def _sync_in_small_buckets(rank):
    return _sync(rank, bucket_bytes=6 << 20)


def test_a_plan_of_many_experts_is_inferred(tmp_path):
    make_assets(tmp_path, architecture="qwen3_moe", layers=4, experts=80)
    variables = {LOAD_PLANS_VARIABLE: str(tmp_path / "load-plans")}
    with (
        served(tmp_path, tp=2, variables=variables) as engine,
        engine.ranks() as ranks,
    ):
        reference = engine.hashes()
        for first, second, third in ranks.run(_sync_in_small_buckets):
            assert (first["eager_reason"], first["is_proven"]) == (MAKING_PLAN, True)
            for later in (second, third):
                assert later["num_pulled"] == later["num_buckets"]
        assert engine.hashes() == reference
    counts = re.findall(r"in (\d+) buckets, of which (\d+) are inferred", engine.log)
    assert len(counts) == 2, "one on each TP rank"
    assert all(0 < int(inferred) < int(num) for num, inferred in counts), counts
