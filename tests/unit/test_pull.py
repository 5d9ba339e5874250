"""Engines read the trainer ranks' parameters: real FSDP2 and verl's export, four ranks on gloo."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from sglang_loader.common.layout import BucketLayout, BucketTensor
from sglang_loader.common.regions.compose import ByteMap
from sglang_loader.session.mapped_memory import MappedMemory
from unit import route_ranks
from unit.route_ranks import TP, Rank
from verl_sglang_sync.engine.session import EngineCannotMap
from verl_sglang_sync.routes.pull.located import SpreadRead, bucket_reads
from verl_sglang_sync.sources import comparison
from verl_sglang_sync.sources.export_trace import (
    TracedExport,
    TracedParameter,
    TracedTensor,
)
from verl_sglang_sync.sources.transfer_plan import Origin, Owners, held_by_all, shards_of_rows


class PullRank(Rank):
    """A rank whose parameters are pulled; `spoils`: the engines' loaders change what they load."""

    def __init__(self, *, spoils=False, **options):
        super().__init__("pull", **options)
        for model in self.engine.models if spoils and self.engine is not None else ():
            model.adds = 0

    def sync_among_hosts(self, engines, trainers):
        """A sync where hosts have these names, with the replica's number in them."""
        with (
            mock.patch("sglang_loader.session.serve.host_id", lambda: name_in(engines)),
            mock.patch("verl_sglang_sync.routes.pull.route.host_id", lambda: name_in(trainers)),
        ):
            self.sync()

    def unmap(self):
        """The engines have nothing mapped any more, as after a restart; the handles are used."""
        for state in self.engine._states if self.engine is not None else ():
            for key, made in state.items():
                state[key] = MappedMemory() if isinstance(made, MappedMemory) else made

    def empty_storages(self):
        """From now on offloaded parameters come back into the same storages, at the same addresses
        perhaps.
        """
        self.export.sources.empties_storages = True

    def untie(self):
        """The head is a parameter of its own now, with other values."""
        head = torch.nn.Parameter(self.model.model.embed_tokens.weight.detach().clone())
        head.to_local().untyped_storage().share_memory_()
        self.model.lm_head.weight = head
        with torch.no_grad():
            head.to_local().add_(1)


def name_in(template):
    return template.format(dist.get_rank() // TP)


def play(pool, *steps, kind="moe", **options):
    return route_ranks.play(pool, PullRank, {"kind": kind, **options}, *steps)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("kind", ["dense", "tied", "moe", "vl"])
def test_what_is_pulled_is_what_the_export_would_give(pool, kind, strategy):
    for seen in play(pool, "sync", *["step", "sync"] * 3, kind=kind, strategy=strategy):
        assert seen["routes"] == ["export", "pull", "pull", "pull"]
        assert seen["num_exports"] == [1], "what the engines get is what is compared"
        assert seen["off"] is None
        learnt, first, second, third = seen["num_handles"]
        assert 0 == learnt < first < second == third, "blocks that stay mapped need no new handles"
        assert seen["keeps"]


PROVE = "verl_sglang_sync.sources.comparison.Comparison.finish"
COMPARE = "verl_sglang_sync.sources.comparison.memory_of"
DELIVER = "verl_sglang_sync.routes.pull.route.PulledBuckets.deliver"
SHARE = "verl_sglang_sync.routes.pull.route.share_block"
LOAD = "unit.route_ranks.EngineModel.load_weights"
CHANGES = {
    "parameters that come back elsewhere are located before each sync": (
        {},
        ["sync", *["move", "step", "sync"] * 3],
        ["export", "pull", "pull", "pull"],
        [],
    ),
    "a shard moved on one rank": (
        {},
        [*["sync"] * 3, ("move", 2, 2), "sync"],
        ["export", "pull", "pull", "pull"],
        ["AGAIN"],
    ),
    "other parameters are exported, and traced again": (
        {"kind": "tied"},
        [*["sync"] * 3, "untie", *["sync"] * 2],
        ["export", "pull", "pull", "export", "pull"],
        ["EXPORT"],
    ),
    "an engine has nothing mapped, and gets new handles": (
        {},
        [*["sync"] * 3, "unmap", "sync"],
        ["export", "pull", "pull", "pull"],
        ["AGAIN"],
    ),
    "an engine reads from another node": (
        {},
        [("sync_among_hosts", "another", "this one"), "sync"],
        ["export", "export"],
        [],
    ),
    "the trainer is on several nodes": (
        {},
        [("sync_among_hosts", "node {}", "node {}"), "sync"],
        ["export", "export"],
        [],
    ),
    "a loader changes a copy of what it loads": (
        {"spoils": True},
        ["sync", "step", "sync"],
        ["export", "pull"],
        [],
    ),
    "every other sync is a check": (
        {"recheck": 2},
        ["step", "sync"] * 5,
        ["export", "pull", "export", "pull", "export"],
        [],
    ),
}
"""Options, steps, the routes of the syncs, and what was done after those that failed."""


@pytest.mark.parametrize(
    ("options", "steps", "routes", "recoveries"), CHANGES.values(), ids=CHANGES
)
def test_what_changes_is_noticed(pool, options, steps, routes, recoveries):
    for seen in play(pool, *steps, **options):
        assert seen["routes"] == routes
        assert seen["recoveries"] == recoveries
        assert seen["off"] is None


def test_memory_that_was_offloaded_is_mapped_anew_for_each_sync(pool):
    for seen in play(pool, "empty_storages", *["step", "sync"] * 4):
        assert seen["routes"] == ["export", "pull", "pull", "pull"]
        assert seen["recoveries"] == []
        assert not seen["keeps"], "mapped memory could not be given back"
        handles = seen["num_handles"]
        assert handles == [i * handles[1] for i in range(4)] != [0] * 4, "new ones for each sync"


REFUSED = {
    "a proof that breaks": (
        {},
        [("sync_failing", 1, PROVE, RuntimeError("the comparison broke"))],
        [],
        "the comparison broke",
    ),
    "a comparison that breaks midway": (
        {},
        [("sync_failing", 2, COMPARE, MemoryError("no room to compare"))],
        [],
        "no room to compare",
    ),
    "no handle can be made": (
        {},
        ["sync", ("sync_failing", 1, SHARE, ValueError("not of this memory"))],
        [],
        "not of this memory",
    ),
    "private": ({"is_shared": False}, ["sync"], [], "cannot be mapped by other processes"),
    "nothing can be mapped": (
        {},
        ["sync", ("sync_failing", 1, DELIVER, EngineCannotMap("no access"))],
        ["EXPORT"],
        "rank 1: no access",
    ),
}
"""Options, steps, what was done after failures, and why nothing is pulled any more."""


@pytest.mark.parametrize(
    ("options", "steps", "recoveries", "reason"), REFUSED.values(), ids=REFUSED
)
def test_what_cannot_be_pulled_is_exported(pool, options, steps, recoveries, reason):
    for seen in play(pool, *steps, "sync", **options):
        assert seen["routes"] == ["export"] * (len(seen["num_handles"]))
        assert seen["recoveries"] == recoveries
        assert reason in seen["off"]


def test_other_failures_are_raised(pool):
    fails = "sync_failing", 2, DELIVER, RuntimeError("the engine failed")
    for seen in play(pool, "sync", fails, "sync", "sync"):
        assert "rank 2: Traceback" in seen["errors"][0]
        assert seen["recoveries"] == ["RAISE"]
        assert seen["routes"] == ["export", "export", "pull"]


def test_where_engines_fail_while_the_export_is_compared_nothing_is_proven(pool):
    fails = "sync_failing", None, LOAD, RuntimeError("the engine broke")
    answers = play(pool, fails, "sync", "sync")
    assert {len(seen["errors"]) for seen in answers} == {1}
    (error,) = {seen["errors"][0] for seen in answers}
    assert "the engine broke" in error
    for seen in answers:
        assert seen["routes"] == ["export", "pull"]
        assert seen["num_handles"][1] == 0 < seen["num_handles"][2]


@st.composite
def _sharded_exports(draw):
    """Tensors that are parts of parameters, whose rows are spread over some ranks: their layout,
    where they are, the parameters, and the tensors by name.
    """
    world = draw(st.integers(1, 5))
    parameters, full, tensors, traced, exported = [], [], [], {}, {}
    end = 0
    for number in range(draw(st.integers(1, 4))):
        rows, row_bytes = draw(st.integers(1, 9)), draw(st.integers(1, 7))
        nbytes = rows * row_bytes
        owners = shards_of_rows(rows, row_bytes, list(range(world)))
        if draw(st.booleans()):
            owners = held_by_all(nbytes, world)
        parameters.append(TracedParameter(f"p{number}", owners))
        full.append(torch.randint(0, 255, (nbytes,), dtype=torch.uint8))
        for part in range(draw(st.integers(0, 3))):
            first = draw(st.integers(0, nbytes))
            size = draw(st.integers(0, nbytes - first))
            end += draw(st.integers(0, 5))
            name = f"t{number}.{part}"
            tensors.append(BucketTensor(name, (size,), torch.uint8, end))
            origin = Origin(number, ByteMap(first, ((max(size, 1), 1),)))
            traced[name] = TracedTensor(torch.uint8, (size,), origin)
            exported[name] = full[-1][first : first + size]
            end += size
    layout = BucketLayout(tuple(tensors), end)
    return layout, TracedExport(tuple(parameters), traced), full, exported


@given(_sharded_exports(), st.data())
def test_the_pieces_are_the_bytes_of_the_tensors(case, data):
    layout, traced, full, exported = case
    rank = data.draw(st.integers(0, 4))
    bucket, stop = torch.zeros(layout.nbytes, dtype=torch.uint8), 0
    for part in bucket_reads(layout, traced):
        read, owner = part.read, part.owner(rank)
        assert read.start >= stop and not read.dims, "ascending, and apart"
        stop = read.start + read.run
        owners = traced.parameters[read.tensor].owners
        shard = next(i for i, ranks in enumerate(owners.holders) if owner in ranks)
        assert owner == rank or rank not in owners.holders[shard]
        at = owners.starts[shard] + read.offset
        bucket[read.start : stop] = full[read.tensor][at : at + read.run]
    for tensor in layout.tensors:
        found = bucket[tensor.offset : tensor.offset + tensor.nbytes]
        assert torch.equal(found, exported[tensor.name])


@given(_sharded_exports(), st.data())
def test_a_rank_finds_the_wrong_byte_that_is_in_its_own_shard(case, data):
    """Rank 0's comparison, which waits for the device after each tensor, or once."""
    layout, traced, full, exported = case
    exported, shards = {name: tensor.clone() for name, tensor in exported.items()}, {}
    for parameter, whole in zip(traced.parameters, full, strict=True):
        ranges = [parameter.owners.range_of(i) for i in _own_shards(parameter.owners)]
        parts = [whole[start:stop] for start, stop in ranges] or [whole[:0]]
        shards[parameter.source] = torch.cat(parts)
    wrong = [t for t in layout.tensors if t.nbytes and data.draw(st.booleans())]
    expected = None
    for tensor in wrong:
        at = data.draw(st.integers(0, tensor.nbytes - 1))
        exported[tensor.name][at] += 1
        origin = traced.tensors[tensor.name].origin
        ranges = traced.parameters[origin.parameter].owners
        place = origin.bytes.offset + at
        is_own = any(
            start <= place < stop for start, stop in map(ranges.range_of, _own_shards(ranges))
        )
        expected = expected or (tensor.name if is_own else None)
    with mock.patch.object(comparison, "MAX_AHEAD_BYTES", data.draw(st.sampled_from([0, 1 << 30]))):
        found = comparison.Comparison(traced, shards, torch.device("cpu"))
        first = data.draw(st.integers(0, len(exported)))
        found.add([*exported.items()][:first])
        found.add([*exported.items()][first:])
    text = " is exported with other bytes than its parameter has"
    assert found.finish() == (None if expected is None else expected + text)


def test_an_export_that_lacks_a_tensor_is_another():
    owners = held_by_all(4, 1)
    traced = TracedExport(
        (TracedParameter("p", owners),),
        {"t": TracedTensor(torch.uint8, (4,), Origin(0, ByteMap(0, ((4, 1),))))},
    )
    whole = torch.arange(4, dtype=torch.uint8)
    for name, expected in (
        ("t", None),
        ("u", "u was not traced, or not with this shape and dtype"),
        (None, "0 tensors were exported, 1 traced"),
    ):
        found = comparison.Comparison(traced, {"p": whole}, torch.device("cpu"))
        if name is not None:
            found.add([(name, whole.clone())])
        assert found.finish() == expected


def _own_shards(owners):
    """Those that rank 0 reads on its own behalf."""
    return [i for i in range(len(owners.starts)) if owners.owner_of(i, 0) == 0]


def test_a_tensor_whose_bytes_are_spread_is_found_in_its_shards():
    """A row-parallel weight of [4, 8] bytes: rank 0 has the left half of each row."""
    traced = TracedExport(
        (TracedParameter("p", Owners((0, 16), ((0,), (1,)), 32)),),
        {"t": TracedTensor(torch.uint8, (4, 8), Origin(0, ByteMap(0, ((4, 4), (2, 16), (4, 1)))))},
    )
    layout = BucketLayout((BucketTensor("t", (4, 8), torch.uint8, 8),), 40)
    (read,) = bucket_reads(layout, traced)
    assert read == SpreadRead(8, traced.tensors["t"].origin)
