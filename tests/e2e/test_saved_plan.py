"""A real engine that restarts: its first sync is not traced, and all of its weights are right."""

import pytest

from sglang_loader.common.engine_settings import LOAD_PLANS_VARIABLE
from sglang_loader.common.session.messages import MAKING_PLAN, PROVING_SAVED_PLAN
from support.exports import ShardedExport
from support.served import served
from support.trainer import report_of_cycle

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SCALES = (0.5, 2.0, 1.0)


def _sync(rank):
    """Syncs of other weights each time, which the engine pulls from the second on."""
    manager = rank.manager("compiled")
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
