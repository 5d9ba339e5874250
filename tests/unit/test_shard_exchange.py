"""Trainer ranks fill arranged buffers from their shards: real FSDP2 and verl's export, on gloo."""

import pytest

from unit import exchange_ranks, route_ranks
from unit.exchange_ranks import ExchangeRank
from unit.route_ranks import BUCKET_BYTES
from verl_sglang_sync.sources.source_map import MAX_TRACES

NUM_RANKS = 4


def play(pool, *steps, **options):
    """What each rank saw of its syncs; see `route_ranks.play`."""
    return pool.run(route_ranks.play, ExchangeRank, options, *steps)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("dense", "float32"), ("tied", "bfloat16"), ("moe", "bfloat16"), ("vl", "float32")],
)
def test_the_buffers_are_those_of_the_full_export(pool, kind, dtype):
    for seen in play(pool, "sync", *["step", "sync"] * 2, model=kind, dtype=dtype):
        assert seen["off"] is None
        assert seen["routes"] == ["export", "exchange", "exchange"]
        assert seen["wrong"] == [[], []]
        assert seen["num_gathers"] == 0
        assert seen["counts"]["arranged"] < seen["counts"]["payload"]
        assert 0 < seen["counts"]["scratch"] < 2 * BUCKET_BYTES


def test_a_shard_that_moves_on_one_rank_is_sent_from_where_it_is(pool):
    for seen in play(pool, "sync", *["step", ("move", 2), "sync"] * 2, model="dense"):
        assert seen["routes"] == ["export", "exchange", "exchange"]
        assert not any(seen["wrong"])


def test_other_parameters_are_exported_and_traced_again_a_few_times(pool):
    """A parameter is of another kind on rank 2 alone, again and again."""
    moves = [("move", 2, offset) for offset in range(1, 6)]
    steps = [step for move in moves for step in ("sync", "sync", move)]
    for seen in play(pool, *steps, model="dense"):
        assert seen["routes"] == ["export", "exchange"] * MAX_TRACES + ["export", "export"]
        assert not any(seen["wrong"])
        assert f"the parameters were replaced by others {MAX_TRACES} times" in seen["off"]


def test_what_was_planned_with_another_trace_is_not_exchanged(pool):
    assert pool.run(exchange_ranks.trace_anew) == [["export", "export", "exchange"]] * NUM_RANKS


def test_the_comparison_is_repeated_when_it_is_due(pool):
    """With other parameters, nothing is concluded: all is planned anew after the next sync."""
    steps = [*["sync"] * 4, ("move", 2, 1), *["sync"] * 2]
    for seen in play(pool, *steps, model="tied", recheck=2):
        assert seen["routes"] == ["export", "exchange", "export", "exchange", "export", "export"]
        assert not any(seen["wrong"])
        assert seen["off"] is None


@pytest.mark.parametrize("piece", [0, -1])
def test_a_rank_that_cannot_pack_fails_alone_and_the_next_sync_is_right(pool, piece):
    steps = ("sync", ("sync_failing", piece), "sync")
    for rank, seen in enumerate(play(pool, *steps, model="dense")):
        assert seen["errors"] == ["no room to pack" if rank == 1 else None, None]
        assert seen["recoveries"] == ["RAISE"]
        assert seen["routes"] == ["export", "exchange"]
        assert seen["wrong"] == [[]]


def test_a_rank_that_cannot_pack_ends_the_proof_on_all_ranks(pool):
    steps = ("sync", ("sync_failing", 0), "sync")
    for seen in play(pool, *steps, model="dense", recheck=1):
        assert "rank 1: " in seen["off"] and "no room to pack" in seen["off"]
        assert seen["routes"] == ["export", "export", "export"]


def test_an_export_that_computes_is_not_traced(pool):
    words = {
        "casts": "converts torch.float32 to torch.float16",
        "adds": "computes with what it gathered: aten.add.Tensor",
        "adds in place": "computes with what it gathered: aten.add_.Tensor",
        "reverses rows": "computes with what it gathered: aten.flip.default",
        "reads values": "computes with what it gathered: aten.sum.default",
        "communicates": "communicates: c10d.allreduce_.default",
        "brings its own": "extra is computed by aten.ones.default",
        "repeats a shape": "computes with what it gathered: aten.empty_like.default",
        "breaks on rank 3": "rank 3: the export failed while it was traced",
        "differs on rank 1": "the ranks traced different exports",
    }
    answers = pool.run(exchange_ranks.refused_exports)
    assert answers == [answers[0]] * NUM_RANKS
    assert answers[0].keys() == words.keys()
    for name, (reason, routes) in answers[0].items():
        assert words[name] in reason
        assert routes == ["export", "export"]


def test_parameters_that_are_laid_out_otherwise_are_refused(pool):
    words = {
        "columns": "it is placed as S(1)",
        "two dimensions": "its mesh (2, 2) is not one line of all 4 ranks",
        "transposed": "its memory has strides (1, 6)",
        "replicated": None,
        "plain": None,
        "on another device": "w is on meta, the engine on cpu",
    }
    for reasons in pool.run(exchange_ranks.unsupported_parameters):
        assert reasons.keys() == words.keys()
        for name, reason in reasons.items():
            assert (reason is None) == (words[name] is None), (name, reason)
            assert reason is None or words[name] in reason


def test_views_and_copies_of_what_is_gathered_are_followed(pool):
    for found in pool.run(exchange_ranks.views_and_copies):
        refused = found.pop("ragged view of a copy")
        assert "is a view of a copy that is no view of its parameter" in refused
        assert set(found.values()) == {"found"}, found


def test_a_wrong_origin_never_reaches_the_engine(pool):
    for seen in play(pool, "sync_with_spoiled_origins", "sync", model="moe"):
        assert seen["routes"] == ["export", "export"]
        assert "experts.2.up_proj.weight differs from the full export" in seen["off"]


def test_what_would_be_sent_is_compared_before_it_is(pool):
    for seen in pool.run(exchange_ranks.prove_sending):
        assert seen["right"] == (True, None)
        is_sent, why = seen["wrong"]
        assert not is_sent and "differs from the full export" in why


def test_a_backend_without_an_all_to_all_means_the_full_export(pool):
    for seen in play(pool, "sync_without_all_to_all", "sync", model="tied"):
        assert seen["routes"] == ["export", "export"]
        assert "this backend has no all-to-all" in seen["off"]


def test_a_rank_that_gives_up_still_sends_what_the_others_wait_for(pool):
    for seen in play(pool, "sync", ("give_up", 1), "sync", model="dense"):
        assert seen["routes"] == ["export", "exchange"]
        assert seen["wrong"] == [[]]
