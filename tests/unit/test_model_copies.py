"""Trainer ranks whose copies of a parameter differ are named: real FSDP1 and FSDP2, gloo."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from unit.route_ranks import export_of, sharded
from unit.trainer_ranks import WORLD_SIZE, trainer_ranks
from verl_sglang_sync.routes.table.wires import Wires
from verl_sglang_sync.sources.model_copies import (
    CopyDifference,
    check_copies,
    differing_copies,
)
from verl_sglang_sync.sources.owners import nearest
from verl_sglang_sync.trainer_ranks import WeightSyncError

CPU = torch.device("cpu")


def compare(rows, drifting, tp, drifting_later=()):
    """How the ranks' copies differ before and after some of them train alone, and whether that is
    an error.

    Args:
        rows: of the mesh: replicas of the model.
        drifting: ranks that train one parameter otherwise.
        drifting_later: ranks that train a later parameter otherwise.
    """
    from verl_sglang_sync.sources.source_map import SourceMap

    ranks = trainer_ranks(tp)[0]
    mesh = init_device_mesh("cpu", (rows, WORLD_SIZE // rows) if rows > 1 else (WORLD_SIZE,))
    options = {}
    if rows > 1:
        from torch.distributed.fsdp import ShardingStrategy

        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    with mock.patch("unit.route_ranks.init_device_mesh", lambda *_: mesh):
        model = sharded("dense", strategy="fsdp1", **options)
    export, source_map = export_of(model), SourceMap(ranks, CPU)
    assert source_map.trace(export) is None
    traced = source_map.traced

    def difference():
        return differing_copies(traced, source_map.parameters(export, traced), ranks, CPU)

    before = difference()
    if dist.get_rank() in drifting:
        with torch.no_grad():
            list(model.parameters())[1].view(-1)[-1] += 1
    if dist.get_rank() in drifting_later:
        with torch.no_grad():
            list(model.parameters())[2].view(-1)[-1] += 1
    after, error = difference(), None
    try:
        check_copies(after, [(ranks.replica_ranks, dist.get_rank())], ranks, nearest)
    except WeightSyncError as raised:
        error = str(raised)
    return before, [str(each) for each in after], error


@pytest.mark.parametrize(
    ("rows", "drifting", "tp", "found", "is_error"),
    [
        (1, [2], 2, None, False),  # each byte is on one rank alone: nothing to compare
        (4, [], 2, None, False),
        (4, [3], 2, "model.layers.0 has other values on ranks 0, 1, 2 than on ranks 3", True),
        (4, [2, 3], 2, "model.layers.0 has other values on ranks 0, 1 than on ranks 2, 3", False),
        (2, [3], 2, "model.layers.0 has other values on ranks 1 than on ranks 3", False),
    ],
)
def test_copies_that_drifted_apart_are_named(pool, rows, drifting, tp, found, is_error):
    answers = pool.run(compare, rows, drifting, tp)
    assert len(set(map(str, answers))) == 1, "the same on every rank"
    before, after, error = answers[0]
    assert not before and after == ([found] if found else [])
    assert (error is not None) == is_error
    if is_error:
        assert found in error and "TP ranks of one engine" in error and "fsdp_size=-1" in error


def compare_failing():
    """What is found where one rank cannot take the digests."""
    failing = "verl_sglang_sync.sources.model_copies.digests_on_host"
    error = torch.OutOfMemoryError("no memory") if dist.get_rank() == 1 else None
    if error is None:
        return compare(4, [3], 2)[1]
    with mock.patch(failing, side_effect=error):
        return compare(4, [3], 2)[1]


def test_a_failed_comparison_leaves_no_rank_waiting(pool):
    assert pool.run(compare_failing) == [[]] * WORLD_SIZE


def test_every_drift_is_judged(pool):
    """The first differs between engines alone. The second differs within an engine."""
    for _, after, error in pool.run(compare, 4, [2, 3], 2, [3]):
        assert len(after) == 2
        assert error is not None and "model.layers.1 has other values" in error


def test_drifts_of_other_holders_are_judged(pool):
    """Ranks 0 and 2, and 1 and 3, hold the same shards."""
    for _, after, _ in pool.run(compare, 2, [2, 3], 2):
        assert [each.partition(" has ")[2] for each in after] == [
            "other values on ranks 0 than on ranks 2",
            "other values on ranks 1 than on ranks 3",
        ]


def test_the_copies_that_are_read_are_judged():
    """An engine of two ranks on two hosts reads a near copy on each, and they differ."""
    difference = CopyDifference("norm", ((0,), (2,)))
    wires = Wires(("a", "a", "b", "b"), ("a", "b"), first_reader=4, can_map=True)
    assert difference.is_mixed([0, 1], wires.holder)
    assert not difference.is_mixed([0], wires.holder)
    assert not difference.is_mixed([4, 5], nearest)
