"""A wire for each pair of ranks: trainer ranks on two hosts, whose names alone are made up."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from sglang_loader.common.layout import WireError
from sglang_loader.common.regions.read import Read
from sglang_loader.common.rounds import RoundPart, SentRound
from unit import route_ranks
from unit.route_ranks import TP, Rank
from verl_sglang_sync.engine.engine_ranks import KnownEngineRank
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.table.sending import check_parts
from verl_sglang_sync.routes.table.transports import count_pairs
from verl_sglang_sync.routes.table.wires import Wires
from verl_sglang_sync.sources.export_trace import TracedExport, TracedParameter
from verl_sglang_sync.sources.owners import Owners, held_by_all


class HostRank(Rank):
    """A rank on one of two hosts, each of which has a replica and its trainer ranks."""

    def __init__(self, **options):
        super().__init__("both", **options)

    def sync_on_two_hosts(self):
        """A sync in which IPC between the hosts would be refused."""
        host = f"host {dist.get_rank() // TP}"
        with (
            mock.patch("sglang_loader.session.serve.host_id", lambda: host),
            mock.patch("verl_sglang_sync.routes.table.table_route.host_id", lambda: host),
        ):
            self.sync()


def play(pool, *steps, **options):
    return route_ranks.play(pool, HostRank, options, *steps)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("kind", ["dense", "moe", "tied"])
def test_near_shards_are_mapped_and_far_ones_sent(pool, kind, strategy):
    steps = ["sync_on_two_hosts", *["step", "sync_on_two_hosts"] * 3]
    for rank, seen in enumerate(play(pool, *steps, kind=kind, strategy=strategy)):
        assert seen["errors"] == [] and seen["off"] is None and seen["state"] == "PROVEN"
        assert seen["routes"] == ["export", "pull", "pull", "pull"], "the second goes by the table"
        report = seen["report"]
        assert report["num_pulled"] == report["num_exchanged"] == report["num_buckets"]
        sent = [nbytes > 0 for (nbytes,) in report["pair_bytes"]]
        far = [sender // TP != rank // TP for sender in range(len(sent))]
        assert sent == far, "each rank of the other host sends, none of this one does"
        assert 0 < report["sent_bytes"] < report["payload_bytes"] / 2


def test_a_failed_far_rank_costs_one_export(pool):
    fails = ("sync_failing", 1, "verl_sglang_sync.routes.table.sending.Sender.pack", MemoryError())
    for seen in play(
        pool, *["sync_on_two_hosts"] * 2, fails, *["sync_on_two_hosts"] * 3, kind="moe"
    ):
        assert seen["errors"] == []
        assert seen["routes"][:2] == ["export", "pull"] and seen["routes"][-1] == "pull"


def test_a_moved_parameter_is_located_again(pool):
    steps = ["sync_on_two_hosts", *[("move", 2, 2), "step", "sync_on_two_hosts"] * 2]
    for seen in play(pool, *steps, kind="moe"):
        assert seen["routes"] == ["export", "pull", "pull"]
        assert set(seen["recoveries"]) <= {"AGAIN"}


def test_a_rank_without_memory_for_rounds_hangs_nobody(pool):
    fails = ("sync_failing", 1, "verl_sglang_sync.routes.table.sending.Sender.begin", MemoryError())
    steps = [*["sync_on_two_hosts"] * 2, fails, *["sync_on_two_hosts"] * 2]
    for seen in play(pool, *steps, kind="moe"):
        assert seen["errors"] == [] and seen["routes"][-1] == "pull"


TRACED = TracedExport((TracedParameter("p", Owners((0, 16), ((0,), (1,)), 40)),), {})


@pytest.mark.parametrize(
    ("shard", "offset", "rank", "error"),
    [
        (0, 8, 0, "shard 0 is to be sent up to byte 24, and it has 16 bytes"),
        (1, 9, 1, "shard 1 is to be sent up to byte 25, and it has 24 bytes"),
        (1, 0, 0, "shard 1 is to be sent, and rank 0 does not hold it"),
        (2, 0, 1, "shard 2 is to be sent, and rank 1 does not hold it"),
    ],
)
def test_nothing_outside_of_own_shards_is_sent(shard, offset, rank, error):
    parts = [RoundPart((Read(shard, offset, (), 16, 0),), 16)]
    with pytest.raises(WireError, match=error):
        check_parts(TRACED, parts, rank)


def test_all_of_an_own_shard_may_be_sent():
    check_parts(TRACED, [RoundPart((Read(1, 8, (), 16, 0), Read(1, 0, (), 24, 16)), 40)], 1)


def test_the_bytes_of_each_pair_are_counted():
    engines = [SimpleNamespace(known=KnownEngineRank()) for _ in range(2)]
    engines[1].known.rounds = [SentRound((RoundPart((Read(0, 0, (), 24, 0),), 32),))] * 2
    report = SyncReport(mode="compiled", replica=0)
    count_pairs(report, engines)
    assert report.pair_bytes == [[0, 48]] and report.sent_bytes == 48


def test_a_holder_on_the_same_host_is_preferred():
    wires = Wires(("a", "a", "b", "b"), ("b", "a"), first_reader=4, can_map=True)
    assert [wires.holder((0, 2), reader) for reader in range(2)] == [2, 0]
    assert wires.readers_of(1) == [1] and wires.readers_of(3) == [0]
    assert not wires.is_sent_to(0, [held_by_all(4, 4)])
    assert wires.is_sent_to(0, [Owners((0,), ((1,),), 4)])
    nothing = Wires(("a",), ("a",), first_reader=0, can_map=False)
    assert nothing.is_sent_to(0, [held_by_all(4, 1)])
