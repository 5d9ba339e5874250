"""Engines with DP attention: each rank has a scheduler of its own, and all of its attention.

verl asks for them with `rollout.data_parallel_size`; the experts are still sharded over all ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_assets import make_assets

from support.engine_hash import HASH_LOADER
from support.engine_steps import SCALES, syncs_in_a_row
from support.sglang_server import sglang_server
from support.trainer import run_trainer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TP = 2
DP_ATTENTION = ("--dp-size", str(TP), "--enable-dp-attention")
NO_GENERATION = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
"""A look at the server's health needs no forward pass then; a CPU has none with DP attention."""


def test_every_scheduler_gets_the_weights(tmp_path: Path) -> None:
    make_assets(tmp_path, architecture="qwen3_moe")
    model = tmp_path / "model"
    with sglang_server(
        model,
        tmp_path,
        tp=TP,
        loaders=(HASH_LOADER,),
        extra=DP_ATTENTION,
        variables=NO_GENERATION,
    ) as server:
        outcomes = run_trainer(
            syncs_in_a_row, tmp_path, str(model), str(tmp_path), urls=[server.url], tp=TP
        )
        assert [outcome.error for outcome in outcomes] == [None] * TP
        assert server.process.poll() is None
    seen = outcomes[0].result
    eager = [hashes for hashes, _ in seen["eager"]]
    assert len(eager) == len(SCALES)
    attention, experts = ("self_attn.qkv_proj.weight", "mlp.experts.w13_weight")
    first, second = eager[0]
    assert [name for name in first if name.endswith(attention) and first[name] == second[name]]
    assert not [name for name in first if name.endswith(experts) and first[name] == second[name]]
    ways = [*seen["compiled"], *seen["sharded"], *seen["pulled"]]
    for way in [*ways, *seen["moved"]]:
        assert [hashes for hashes, _ in way] == eager
    for way in ways:
        last = way[-1][1]
        assert last["num_replayed"] == last["num_buckets"], last["eager_reason"]
    for way in seen["sharded"]:
        last = way[-1][1]
        assert last["num_exchanged"] == last["num_buckets"]
        assert 0 < last["num_arranged"] < last["num_buckets"], "experts alone are sharded"
