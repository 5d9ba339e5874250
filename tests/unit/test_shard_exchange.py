"""Trainer ranks fill arranged buffers from their shards: real FSDP2 and verl's export, on gloo."""

import pytest

from unit import exchange_ranks, route_ranks
from unit.exchange_ranks import ExchangeRank
from unit.route_ranks import BUCKET_BYTES
from verl_sglang_sync.sources.source_map import MAX_TRACES

NUM_RANKS = 4
DELIVER = "verl_sglang_sync.routes.mapped_delivery.MappedDelivery.deliver"


def play(pool, *steps, **options):
    """What each rank saw of its syncs, which were right; see `route_ranks.play`."""
    answers = pool.run(route_ranks.play, ExchangeRank, options, *steps)
    for seen in answers:
        assert not any(seen["wrong"])
        assert seen["num_gathers"] == 0
    return answers


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("dense", "float32"), ("tied", "bfloat16"), ("moe", "bfloat16"), ("vl", "float32")],
)
def test_the_buffers_are_those_of_the_full_export(pool, kind, dtype):
    for seen in play(pool, "sync", *["step", "sync"] * 2, kind=kind, dtype=dtype):
        assert seen["off"] is None
        assert seen["routes"] == ["export", "exchange", "exchange"]
        report = seen["report"]
        assert report["num_arranged"] > 0
        assert report["sent_bytes"] < report["payload_bytes"]
        assert report["staging_bytes"] < 4 * BUCKET_BYTES, "two buffers, and scratch"


def test_a_shard_that_moves_on_one_rank_is_sent_from_where_it_is(pool):
    for seen in play(pool, "sync", *["step", ("move", 2, 0), "sync"] * 2, kind="dense"):
        assert seen["routes"] == ["export", "exchange", "exchange"]
        assert not any(seen["wrong"])


def test_other_parameters_are_exported_and_traced_again_a_few_times(pool):
    """A parameter is of another kind on rank 2 alone, again and again."""
    moves = [("move", 2, 0, offset) for offset in range(1, 6)]
    steps = [step for move in moves for step in ("sync", "sync", move)]
    for seen in play(pool, *steps, kind="dense"):
        assert seen["routes"] == ["export", "exchange"] * MAX_TRACES + ["export", "export"]
        assert f"the parameters were replaced by others {MAX_TRACES} times" in seen["off"]


def test_what_was_planned_with_another_trace_is_not_exchanged(pool):
    for seen in play(pool, "sync", ("move", 2, 0, 1), "trace_anew", "sync", "sync", kind="dense"):
        assert seen["routes"] == ["export", "export", "exchange"]


def test_the_comparison_is_repeated_when_it_is_due(pool):
    """With other parameters, nothing is concluded: all is planned anew after the next sync."""
    steps = [*["sync"] * 4, ("move", 2, 0, 1), *["sync"] * 2]
    for seen in play(pool, *steps, kind="tied", recheck=2):
        assert seen["routes"] == ["export", "exchange", "export", "exchange", "export", "export"]
        assert not any(seen["wrong"])
        assert seen["off"] is None


@pytest.mark.parametrize("piece", [0, -1])
def test_a_rank_that_cannot_pack_fails_alone_and_the_next_sync_is_right(pool, piece):
    steps = ("sync", ("sync_without_room", piece), "sync", "sync")
    for seen in play(pool, *steps, kind="dense"):
        (error,) = seen["errors"]
        assert "rank 1: " in error and "no room to pack" in error
        assert not [rank for rank in (0, 2, 3) if f"rank {rank}: " in error]
        assert seen["recoveries"] == ["RAISE"]
        assert seen["routes"] == ["export", "export", "exchange"]


def test_a_rank_that_cannot_pack_ends_the_proof_on_all_ranks(pool):
    steps = ("sync", ("sync_without_room", 0), "sync")
    for seen in play(pool, *steps, kind="dense", recheck=1):
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
    for name, reason in answers[0].items():
        assert words[name] in reason


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
    for seen in play(pool, "sync_with_spoiled_origins", "sync", kind="moe"):
        assert seen["routes"] == ["export", "export"]
        assert "experts.2.up_proj.weight differs from the full export" in seen["off"]


def test_what_would_be_sent_is_compared_before_it_is(pool):
    for seen in pool.run(exchange_ranks.prove_sending):
        right, (is_sent, why) = seen
        assert right == (True, None)
        assert not is_sent and "differs from the full export" in why


def test_a_backend_without_an_all_to_all_means_the_full_export(pool):
    refusal = RuntimeError("this backend has no all-to-all")
    fails = ("sync_failing", None, "torch.distributed.all_to_all_single", refusal)
    for seen in play(pool, fails, "sync", kind="tied"):
        assert seen["routes"] == ["export", "export"]
        assert str(refusal) in seen["off"]


def test_a_rank_that_gives_up_still_sends_what_the_others_wait_for(pool):
    fails = ("sync_failing", 1, DELIVER, RuntimeError("given up"))
    for seen in play(pool, "sync", fails, "sync", "sync", kind="dense"):
        assert "rank 1: Traceback" in seen["errors"][0]
        assert seen["routes"] == ["export", "export", "exchange"]
