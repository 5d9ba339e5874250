"""Engines with DP attention: each rank has a scheduler of its own, and all of its attention.

verl asks for them with `rollout.data_parallel_size`; the experts are still sharded over all ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.broadcast_steps import sent_syncs
from support.engine_steps import syncs_in_a_row
from support.served import served
from support.sync_checks import check_syncs_in_a_row

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TP = 2
DP_ATTENTION = ("--dp-size", str(TP), "--enable-dp-attention")
SENDS = [(scale, (0,)) for scale in (0.5, 2.0, 0.5, 1.0)]
ELSEWHERE: dict[str, dict[str, Any]] = {
    "num_pulled": {},
    "num_sent": {"read_in_place": False},
    "num_buckets": {"read_in_place": False, "exchange_shards": False},
}
"""How engines on devices of their own are synced, by what the last report has all buckets in."""

NO_GENERATION = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
"""A look at the server's health needs no forward pass then; a CPU has none with DP attention."""


def test_every_scheduler_gets_the_weights(tmp_path: Path) -> None:
    options = {"extra": DP_ATTENTION, "variables": NO_GENERATION}
    with served(tmp_path, tp=TP, architecture="qwen3_moe", **options) as engine:
        seen = engine.run(syncs_in_a_row)[0]
        ways = {
            route: engine.run(sent_syncs, [(engine.url, TP)], SENDS, settings, True)[0]
            for route, settings in ELSEWHERE.items()
        }
        assert engine.lives
    check_syncs_in_a_row(seen, TP)
    first, second = seen["eager"][0][0]
    same = [name for name in first if first[name] == second[name]]
    assert [name for name in same if name.endswith("self_attn.qkv_proj.weight")]
    assert not [name for name in same if name.endswith("mlp.experts.w13_weight")]
    for way in seen["sharded"]:
        last = way[-1][1]
        assert 0 < last["num_arranged"] < last["num_buckets"], "experts alone are sharded"
    for route, way in ways.items():
        half, double, again, back = (sync["hashes"] for sync in way["syncs"])
        assert half == again != double
        assert back == way["reference"] not in (half, double)
        last = way["syncs"][-1]["report"]
        assert last[route] == last["num_replayed"] == last["num_buckets"] > 2
