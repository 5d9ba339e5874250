"""After a sync the engine's weights equal the trainer's bit for bit, hashed inside the engine.

One server per model and TP size: it loads checkpoint A from disk (the reference hash), is synced to
other weights B (the hash must change), and is synced back to A (the reference must return).
"""

import json
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from tiny_assets import make_assets

from support.exports import store_tied_head
from support.http_requests import greedy, post
from support.sender import Senders
from support.served import Served, served
from support.sync_checks import (
    MODES,
    PROVEN,
    SCALES,
    STAGED,
    Syncs,
    check_exchanged,
    check_mode,
    check_pulled,
    of_ranks,
)
from support.trainer import Hashes, Ranks

pytestmark = pytest.mark.e2e

EVERY = [False, True, True, True]


@dataclass(frozen=True)
class Case:
    """A served model, its trainer's ranks, and what the engine loaded."""

    engine: Served
    ranks: Ranks
    reference: Hashes


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("qwen3", True, 2), id="dense-tied-tp2", marks=pytest.mark.slow),
        pytest.param(("qwen3_moe", True, 1), id="moe-tied-tp1", marks=pytest.mark.slow),
        pytest.param(("qwen3_moe", False, 2), id="moe-untied-tp2"),
    ],
)
def case(request, tmp_path_factory):
    """A real server of a tiny model, and real trainer ranks."""
    architecture, tied, tp = request.param
    folder = tmp_path_factory.mktemp("engine")
    make_assets(folder, architecture=architecture, tied=tied)
    if tied and architecture == "qwen3_moe":
        store_tied_head(folder / "model")
    with served(folder, tp=tp) as engine, engine.ranks() as ranks:
        yield Case(engine, ranks, engine.hashes())


@pytest.mark.parametrize("mode", MODES)
def test_sync_is_bit_exact_after_a_refused_one(case, mode):
    check_mode(case.engine, case.ranks, mode)
    assert case.engine.hashes() == case.reference


def test_every_route_equals_the_eager_loader(case):
    """Full tensors on every rank, or shards over all ranks; packed, exchanged or read where they
    are, one of them elsewhere after engines were told where it had been.
    """
    syncs, is_sharded = Syncs([case.engine], case.ranks), case.engine.tp > 1
    for reports in of_ranks(syncs(**STAGED)):
        assert all(report["num_replayed"] == report["num_buckets"] for report in reports[1:])
    for reports in of_ranks(syncs(**STAGED, **PROVEN)):
        assert [report["is_proven"] for report in reports] == [None, True, None, True]
    for way in (syncs("kept"), syncs.pulled):
        check_pulled(way, EVERY)
    check_pulled(syncs("offloaded"), EVERY, is_offloaded=True)
    for export in ("kept", "mapped"):
        moved = syncs(export, moves_after=3)
        for reports in of_ranks(moved):
            assert [report["num_pulled"] > 0 for report in reports] == EVERY
            assert reports[3]["seconds"]["confirm"] > 0, "it is noticed before the commit"
    if is_sharded:  # no rank gathers a weight once the exchange is proven
        check_exchanged(syncs.sharded[0], EVERY)
        failed = syncs("sharded", fails_before=2, **STAGED)
        # What was prepared for a failed sync is forgotten.
        check_exchanged(failed, [False, True, False, True])
        for reports in of_ranks(syncs.sharded[0]):
            for report in reports[1:]:
                assert report["sent_bytes"] < 0.6 * report["payload_bytes"]
    assert case.engine.lives and case.engine.version == str(SCALES[-1])
    answer = json.loads(post(case.engine.url, "generate", greedy(2)).text)
    assert answer["meta_info"]["weight_version"] == str(SCALES[-1]), "what tokens were made with"


@pytest.mark.slow
def test_two_ranks_exchange_all_bytes_for_two_engines(tmp_path):
    """FSDP2's shards over two ranks to engines of TP 1, each of which reads all of every weight."""
    make_assets(tmp_path, architecture="qwen3_moe")
    model = tmp_path / "model"
    with ExitStack() as stack:
        engines = [stack.enter_context(served(tmp_path / f"{i}", model=model)) for i in range(2)]
        ranks = stack.enter_context(Ranks(tmp_path, [engine.url for engine in engines]))
        syncs = Syncs(engines, ranks)
    check_pulled(syncs.pulled, EVERY)
    (way,) = syncs.sharded
    check_exchanged(way, EVERY)
    for reports in of_ranks(way):
        for report in reports[1:]:
            assert report["sent_bytes"] == report["payload_bytes"]


DP_ATTENTION = ("--dp-size", "2", "--enable-dp-attention")
ELSEWHERE = {
    "num_pulled": {},
    "num_sent": {"routes": ["exchange"]},
    "num_buckets": {"routes": []},
}
"""How engines on devices of their own are synced, by what the last report has all buckets in."""

NO_GENERATION = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
"""A look at the server's health needs no forward pass then; a CPU has none with DP attention."""


@pytest.mark.slow
def test_every_scheduler_gets_the_weights_with_dp_attention(tmp_path):
    """Each rank has a scheduler of its own, and all of its attention; verl asks for that with
    `rollout.data_parallel_size`. The experts are still sharded over all ranks.
    """
    options = {"extra": DP_ATTENTION, "variables": NO_GENERATION}
    with (
        served(tmp_path, tp=2, architecture="qwen3_moe", **options) as engine,
        engine.ranks() as ranks,
    ):
        syncs = Syncs([engine], ranks)
        reference = engine.hashes()
        for route, settings in ELSEWHERE.items():
            senders, seen = Senders(ranks, [(engine.url, 2)], shards="mapped", **settings), []
            for scale in (0.5, 2.0, 0.5, 1.0):
                last = senders.sync(scale, "compiled")
                seen.append(engine.hashes())
            assert seen[0] == seen[2] != seen[1]
            assert seen[3] == reference not in (seen[0], seen[1])
            assert last[route] == last["num_replayed"] == last["num_buckets"] > 2
        assert engine.lives
    first, second = syncs.eager[0][0]
    same = [name for name in first if first[name] == second[name]]
    assert [name for name in same if name.endswith("self_attn.qkv_proj.weight")]
    assert not [name for name in same if name.endswith("mlp.experts.w13_weight")]
    for way in syncs.sharded:
        last = of_ranks(way)[0][-1]
        assert 0.5 < last["sent_bytes"] / last["payload_bytes"] < 1, "experts alone are sharded"
