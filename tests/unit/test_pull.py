"""Engines read the trainer ranks' parameters: real FSDP2 and verl's export, four ranks on gloo."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from sglang_loader.common.bucket_source import BucketPiece
from sglang_loader.common.layout import BucketLayout, BucketTensor, WireError, encode_layout
from sglang_loader.common.ranks import Reason
from sglang_loader.common.regions.compose import ByteMap
from sglang_loader.common.weight_map import (
    ShardMemory,
    decode_bases,
    decode_weight_map,
    encode_bases,
    encode_weight_map,
)
from sglang_loader.session.mapped_memory import MappedMemory
from sglang_loader.session.model_loader import ModelLoader
from support.settings import settings_of
from unit import route_ranks
from unit.route_ranks import TP, Rank
from verl_sglang_sync.engine.engine_ranks import OpeningRequest
from verl_sglang_sync.engine.session import EngineCannotMap, EngineFailed, TrainerSession
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.mapped_delivery import MappedDelivery
from verl_sglang_sync.routes.route import Route, RouteContext, RouteState
from verl_sglang_sync.routes.table.table_source import TableSource
from verl_sglang_sync.routes.table.weight_map_builder import (
    NO_BYTES,
    MemoryTable,
    bases_for,
    weight_map_of,
)
from verl_sglang_sync.routes.table.wires import Wires
from verl_sglang_sync.sources import comparison, source_map
from verl_sglang_sync.sources.bucket_cutter import Bucket
from verl_sglang_sync.sources.export_trace import (
    NotTraceable,
    TracedExport,
    TracedParameter,
    TracedTensor,
)
from verl_sglang_sync.sources.owners import Origin, Owners, held_by_all, shards_of_rows
from verl_sglang_sync.sources.snapshot import SourcesChanged
from verl_sglang_sync.trainer_ranks import TrainerRanks

CPU = torch.device("cpu")


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
            mock.patch(
                "verl_sglang_sync.routes.table.table_route.host_id", lambda: name_in(trainers)
            ),
        ):
            self.sync()

    def sync_with_a_lost_request(self):
        """A sync in which the first replica's first request cannot be sent."""
        post, lost = OpeningRequest.post, [dist.get_rank() == 0]

        def posted(request, descriptors):
            if lost[0]:
                lost[0] = False
                raise RuntimeError("can't start new thread")
            post(request, descriptors)

        with mock.patch.object(OpeningRequest, "post", posted):
            self.sync()

    def sync_in_order(self):
        """A sync in which an export is traced before or after the first bucket was delivered."""
        deliver, delivered, trace = MappedDelivery.deliver, [], source_map.trace_export

        def noted(delivery, ready):
            delivered.append(ready.index)
            deliver(delivery, ready)

        def traced(*args, **kwargs):
            self.delivered_when_traced = list(delivered)
            return trace(*args, **kwargs)

        with (
            mock.patch.object(MappedDelivery, "deliver", noted),
            mock.patch.object(source_map, "trace_export", traced),
        ):
            self.sync()

    def check_order(self, expected):
        assert self.delivered_when_traced == expected

    def sync_while_trained(self, on):
        """A sync in whose midst an optimizer of one rank makes a step."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1.0)
        confirm, others = TableSource.confirm, [dist.get_rank() != on]

        def trained(source):
            confirm(source)
            if others and not others.pop():
                for parameter in self.model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()

        with mock.patch.object(TableSource, "confirm", trained):
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
        self.export.sources.is_offloaded = True

    def untie(self):
        """The head is a parameter of its own now, with other values."""
        head = torch.nn.Parameter(self.model.model.embed_tokens.weight.detach().clone())
        head.to_local().untyped_storage().share_memory_()
        self.model.lm_head.weight = head
        with torch.no_grad():
            head.to_local().add_(1)

    def check_tied(self):
        """The head and the embedding come from the same bytes: only then they are tied for sure."""
        tensors = self.route._plan.traced.tensors
        head, embedding = (
            next(tensors[name] for name in tensors if name.endswith(end))
            for end in ("lm_head.weight", "embed_tokens.weight")
        )
        assert head.origins == embedding.origins


def name_in(template):
    return template.format(dist.get_rank() // TP)


def play(pool, *steps, kind="moe", **options):
    return route_ranks.play(pool, PullRank, {"kind": kind, **options}, *steps)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("kind", ["dense", "tied", "moe", "mixtral", "vl"])
def test_pulled_weights_equal_the_export(pool, kind, strategy):
    for seen in play(pool, "sync", *["step", "sync"] * 4, kind=kind, strategy=strategy):
        assert seen["routes"] == ["export", *["pull"] * 4]
        assert seen["num_exports"] == [1], "what the engines get is what is compared"
        assert seen["off"] is None and seen["state"] == "PROVEN"
        assert seen["proven"] == [True, True, *[None] * 3], (
            "again, as the norms hold the same bytes"
        )
        handles = seen["num_handles"]
        assert handles[2] == handles[4], "blocks that stay mapped need no new handles"
        assert 0 < handles[0] < handles[1] < handles[2], "else each is used once"
        assert seen["keeps"]


@pytest.mark.parametrize(("offload", "expected"), [([], [0]), (["empty_storages"], [])])
def test_engines_load_while_an_export_is_traced(pool, offload, expected):
    """Not where it would load parameters a second time."""
    for seen in play(pool, *offload, "sync_in_order", ("check_order", expected), "step", "sync"):
        assert seen["routes"] == ["export", "pull"]
        assert seen["num_exports"] == [1]


PROVE = "verl_sglang_sync.sources.comparison.Comparison.finish"
COMPARE = "verl_sglang_sync.sources.comparison.memory_of"
TRACE = "verl_sglang_sync.sources.source_map.trace_export"
DELIVER = "verl_sglang_sync.routes.table.table_source.TableSource.send"
SHARE = "verl_sglang_sync.routes.table.table_route.share_block"
WAIT = "verl_sglang_sync.routes.table.table_source.synchronize_device"
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
    "every other sync is proven": (
        {"prove": 2},
        ["step", "sync"] * 5,
        ["export", "pull", "pull", "pull", "pull"],
        [],
    ),
    "a rank fails in mid-sync": (
        {},
        ["sync", ("sync_failing", 2, DELIVER, RuntimeError("it failed")), *["step", "sync"] * 2],
        ["export", "export", "export", "pull"],
        ["EXPORT"],
    ),
    "an optimizer works on another stream": (
        {},
        ["sync", ("sync_failing", 0, WAIT, RuntimeError("the device failed")), "sync", "sync"],
        ["export", "export", "export", "pull"],
        ["EXPORT"],
    ),
}
"""Options, steps, the routes of the syncs, and what was done after those that failed."""


@pytest.mark.parametrize(
    ("options", "steps", "routes", "recoveries"), CHANGES.values(), ids=CHANGES
)
@pytest.mark.parametrize("lists_late", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_changes_is_noticed(pool, options, steps, routes, recoveries, lists_late):
    for seen in play(pool, *steps, lists_late=lists_late, **options):
        assert seen["routes"] == routes
        assert seen["recoveries"] == recoveries
        assert seen["off"] is None


def test_the_proof_of_every_other_sync_is_reported(pool):
    for seen in play(pool, *["step", "sync"] * 5, prove=2):
        assert seen["proven"] == [True, True, None, True, None]


def test_offloaded_memory_is_mapped_for_each_sync(pool):
    for seen in play(pool, "empty_storages", *["step", "sync"] * 4):
        assert seen["routes"] == ["export", "pull", "pull", "pull"]
        assert seen["recoveries"] == []
        assert not seen["keeps"], "mapped memory could not be given back"
        handles = seen["num_handles"]
        assert handles == [i * handles[0] for i in range(1, 5)] != [0] * 4, "new ones each time"


REFUSED = {
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
"""Options, steps, how they were made again, and why nothing is pulled any more."""


@pytest.mark.parametrize(
    ("options", "steps", "recoveries", "reason"), REFUSED.values(), ids=REFUSED
)
def test_what_cannot_be_pulled_is_exported(pool, options, steps, recoveries, reason):
    for seen in play(pool, *steps, "sync", "sync", **options):
        assert seen["routes"] == ["export"] * (len(seen["num_handles"]))
        assert seen["recoveries"] == recoveries
        assert seen["state"] == "OFF" and reason in seen["off"]


PASSING = {
    "a comparison that breaks": (1, PROVE, RuntimeError("the comparison broke")),
    "a trace that breaks": (1, TRACE, MemoryError("no room to trace")),
    "a comparison that breaks midway": (2, COMPARE, MemoryError("no room to compare")),
    "memory is short for handles": (1, SHARE, MemoryError("no room for handles")),
    "a proof that breaks": (3, DELIVER, torch.OutOfMemoryError("no room for the proof")),
}
"""On which rank, where and how the first sync's preparation fails."""


@pytest.mark.parametrize(("rank", "target", "error"), PASSING.values(), ids=PASSING)
def test_after_a_passing_error_pull_is_retried(pool, rank, target, error):
    fails = "sync_failing", rank, target, error
    for seen in play(pool, fails, fails, *["step", "sync"] * 4):
        assert seen["errors"] == []
        assert seen["routes"] == ["export"] * 4 + ["pull"] * 2, "after one sync, then after two"
        assert seen["state"] == "PROVEN"


TABLE_RUN = "sglang_loader.load_plan.executor.PlanExecutor.table_run"


def test_a_proof_without_copy_table_proves_nothing(pool):
    """`load_weights` has loaded the shards, and the bytes are right."""
    no_table = "sync_failing", None, TABLE_RUN, MemoryError("no room for the copy table")
    for seen in play(pool, no_table, *["step", "sync"] * 3):
        assert seen["errors"] == []
        assert seen["proven"][0] is None and seen["routes"] == ["export"] * 2 + ["pull"] * 2
        assert seen["state"] == "PROVEN"


def test_a_rank_that_chose_no_way_is_followed(pool):
    """The other ranks have chosen the route by then, and all make the sync again by the export."""
    for seen in play(pool, *["sync"] * 3, "step", "sync_with_a_lost_request", "step", "sync"):
        assert seen["errors"] == [] and seen["recoveries"] == []
        assert seen["routes"] == ["export", "pull", "pull", "export", "pull"]


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_an_optimizer_step_during_a_sync(pool, strategy):
    """What the engines read may be half old, and is not published."""
    steps = *["sync"] * 3, "step", ("sync_while_trained", 1), "sync"
    for seen in play(pool, *steps, strategy=strategy):
        assert seen["errors"] == [] and seen["recoveries"] == ["AGAIN"]
        assert seen["routes"] == ["export", "pull", "pull", "pull", "pull"]


CONFIRM = "verl_sglang_sync.routes.table.table_source.TableSource.confirm"


def test_what_fails_again_is_exported(pool):
    fails = "sync_failing", None, CONFIRM, SourcesChanged("the export is cut into other buckets")
    for seen in play(pool, *["sync"] * 3, "step", fails):
        assert seen["errors"] == []
        assert seen["routes"] == ["export", "pull", "pull", "export"]


def test_a_short_lived_route_is_tried_less_often(pool):
    moves = [step for offset in range(1, 4) for step in ("sync", ("move", 2, 0, offset))]
    for seen in play(pool, *moves, kind="dense"):
        assert seen["routes"] == ["export"] * 3
        assert seen["state"] == "RETRY_LATER" and "changed twice in a row" in seen["off"]


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_a_tied_head_is_traced_to_the_embedding(pool, strategy):
    for seen in play(pool, "sync", "check_tied", "step", "sync", kind="tied", strategy=strategy):
        assert seen["routes"] == ["export", "pull"]


class RefusingRoute(Route):
    """A route that turns itself off when it is asked for a source."""

    fallback_text = "every weight is exported"

    def _source(self, weights, report):
        self.refuse(Reason("nothing can be mapped", is_final=True))


def test_a_route_that_is_off_stays_off():
    """Also if it was short-lived twice, for which it would be tried again later."""
    settings = settings_of("compiled")
    route = RefusingRoute(RouteContext(TrainerRanks(), CPU, settings, lambda: ()))
    for _ in range(2):
        route.note_proven()
        route.note_outdated()
    route.state = RouteState.LEARNT
    assert route.choose([], SyncReport(mode="compiled", replica=0), proves=True) is None
    assert route.state is RouteState.OFF


def test_on_fallback_error_names_the_reasons(pool):
    for seen in play(pool, "sync", is_shared=False, on_fallback="error"):
        assert seen["routes"] == []
        assert "on_fallback=error" in seen["errors"][0]
        assert "cannot be mapped by other processes" in seen["errors"][0]


LOCATE = "verl_sglang_sync.routes.table.located.bases_for"
END = "verl_sglang_sync.routes.table.table_source.TableSource.end"
CHOOSE = "verl_sglang_sync.routes.table.table_route.TableRoute.choose"
OPEN = "verl_sglang_sync.sync.engines.ColocatedEngine.open"
ALONE = {
    "no piece is found": (LOCATE, RuntimeError("lost"), 0),
    "at the end": (END, RuntimeError("lost"), 1),
    "where nothing may fail": (CHOOSE, RuntimeError("lost"), 0),
    "interrupted while it sends": (DELIVER, KeyboardInterrupt(), 1),
    "interrupted before": (OPEN, KeyboardInterrupt(), 1),
    "interrupted at the end": (END, KeyboardInterrupt(), 1),
}
"""What fails on one rank of four, how, and the number of syncs that fail."""


@pytest.mark.parametrize(("target", "error", "num_failed"), ALONE.values(), ids=ALONE)
def test_no_rank_waits_for_one_that_failed_alone(pool, target, error, num_failed):
    pool.run(dist.get_rank)  # the start of the processes is not what is timed
    started = time.monotonic()
    fails = "sync_failing", 1, target, error
    answers = play(pool, "sync", fails, *["step", "sync"] * 2)
    assert time.monotonic() - started < 60, "a rank waits for the whole of a limit"
    for rank, seen in enumerate(answers):
        assert len(seen["errors"]) == num_failed, seen["errors"]
        assert seen["routes"][-2:] == ["export", "pull"]
        if num_failed and rank != 1:
            assert "rank 1" in seen["errors"][0]


class LatePullRank(PullRank):
    """A rank that learns last, and alone, that a proof was not served."""

    def sync_ending_badly(self):
        published, sessions = TrainerSession.wait_until_published, []

        def fails(session):
            sessions.append(session)
            if len(sessions) == 2 and dist.get_rank() == 1:
                raise EngineFailed("gone after Commit")
            return published(session)

        with mock.patch.object(TrainerSession, "wait_until_published", fails):
            self.sync()


def test_a_failure_after_commit_leaves_ranks_in_step(pool):
    steps = ["sync_ending_badly", *["step", "sync"] * 3]
    for seen in route_ranks.play(pool, LatePullRank, {"kind": "dense"}, *steps):
        assert len(seen["errors"]) == 1 and "gone after Commit" in seen["errors"][0]
        assert seen["routes"][-3:] == ["export", "pull", "pull"] and seen["state"] == "PROVEN"


class UnmappingRank(PullRank):
    """A rank of whose engine ranks one fails, once, to let go of what it has read."""

    def sync_unmapping_badly(self):
        let_go, left = ModelLoader.let_go, [dist.get_rank() == TP]

        def fails(loader):
            if left[0]:
                left[0] = False
                raise RuntimeError("it cannot be unmapped")
            let_go(loader)

        with mock.patch.object(ModelLoader, "let_go", fails):
            self.sync()


def test_a_rank_that_cannot_unmap_publishes_nothing(pool):
    """Nor does another replica, so that the sync can be made again."""
    steps = [*["sync"] * 3, "step", "sync_unmapping_badly", "step", "sync"]
    for seen in route_ranks.play(pool, UnmappingRank, {"kind": "dense"}, *steps):
        assert seen["errors"] == [] and seen["recoveries"] == ["EXPORT"]
        assert seen["routes"] == ["export", "pull", "pull", "export", "pull"]


def test_engines_failing_during_comparison_prove_nothing(pool):
    fails = "sync_failing", None, LOAD, RuntimeError("the engine broke")
    answers = play(pool, fails, "sync", "sync")
    assert {len(seen["errors"]) for seen in answers} == {1}
    (error,) = {seen["errors"][0] for seen in answers}
    assert "the engine broke" in error
    for seen in answers:
        assert seen["routes"] == ["export", "pull"]
        assert seen["num_handles"][0] == 0 < seen["num_handles"][1]


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
            traced[name] = TracedTensor(torch.uint8, (size,), (origin,))
            exported[name] = full[-1][first : first + size]
            end += size
    layout = BucketLayout(tuple(tensors), end)
    return layout, TracedExport(tuple(parameters), traced), full, exported


def one_host(num):
    """The wires of as many trainer and engine ranks, all on one host."""
    return Wires(("here",) * num, ("here",) * num, first_reader=0, can_map=True)


@given(_sharded_exports(), st.data())
def test_shards_of_the_map_are_the_tensors(case, data):
    """By the trainer's map and bases, and the engine's reading of both."""
    layout, traced, full, exported = case
    tables, blocks = [], []
    for rank in range(5):  # each rank's shards lie in one block, in any order and apart
        memory, places = torch.zeros(0, dtype=torch.uint8), {}
        for number in data.draw(st.permutations(range(len(full)))):
            owners = traced.parameters[number].owners
            held = [i for i, ranks in enumerate(owners.holders) if rank in ranks]
            places[number] = NO_BYTES
            for shard in held:
                start, stop = owners.range_of(shard)
                places[number] = 0, memory.numel() + 3
                part = torch.full((3,), 255, dtype=torch.uint8), full[number][start:stop]
                memory = torch.cat((memory, *part))
        held_blocks = {f"rank {rank}": ()} if memory.numel() else {}
        blocks += [memory] if memory.numel() else []
        tables.append(MemoryTable(held_blocks, tuple(places[i] for i in range(len(full)))))
    encoded = weight_map_of([Bucket.of(layout, is_last=True)], traced)
    weight_map = decode_weight_map(encoded.data)
    reader = data.draw(st.integers(0, 4))
    bases = decode_bases(bases_for(traced, tables, one_host(5), reader).data)
    source = ShardMemory(weight_map, bases, blocks, CPU).source(0)
    stops = [piece.start + piece.nbytes for piece in source.map.pieces]
    assert stops == sorted(stops), "ascending, and apart"
    bucket = source.packed(layout)
    for tensor in layout.tensors:
        found = bucket[tensor.offset : tensor.offset + tensor.nbytes]
        assert torch.equal(found, exported[tensor.name])


@given(_sharded_exports(), st.data())
def test_a_rank_finds_its_shards_wrong_byte(case, data):
    """Rank 0's comparison, which reads results back after each tensor, after some, or once."""
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
        (origin,) = traced.tensors[tensor.name].origins
        ranges = traced.parameters[origin.parameter].owners
        place = origin.bytes.offset + at
        is_own = any(
            start <= place < stop for start, stop in map(ranges.range_of, _own_shards(ranges))
        )
        expected = expected or (tensor.name if is_own else None)
    with mock.patch.object(
        comparison, "MAX_PENDING_BYTES", data.draw(st.sampled_from([0, 64, 1 << 30]))
    ):
        found = comparison.Comparison(traced, shards.copy, torch.device("cpu"))
        first = data.draw(st.integers(0, len(exported)))
        found.add([*exported.items()][:first])
        found.add([*exported.items()][first:])
    text = " is exported with other bytes than its parameter has"
    reason = found.finish()
    assert (reason and reason.text) == (None if expected is None else expected + text)


def test_an_export_that_lacks_a_tensor_is_another():
    owners = held_by_all(4, 1)
    traced = TracedExport(
        (TracedParameter("p", owners),),
        {"t": TracedTensor(torch.uint8, (4,), (Origin(0, ByteMap(0, ((4, 1),))),))},
    )
    whole = torch.arange(4, dtype=torch.uint8)
    for name, expected in (
        ("t", None),
        ("u", "u was not traced, or not with this shape and dtype"),
        (None, "0 tensors were exported, 1 traced"),
    ):
        found = comparison.Comparison(traced, {"p": whole}.copy, torch.device("cpu"))
        if name is not None:
            found.add([(name, whole.clone())])
        reason = found.finish()
        assert (reason and reason.text) == expected


def _own_shards(owners):
    """Those that rank 0 reads on its own behalf."""
    return [i for i in range(len(owners.starts)) if owners.owner_of(i, 0) == 0]


def test_a_tensor_spread_over_shards_is_one_piece():
    """A row-parallel weight of [4, 8] bytes: rank 0 has the left half of each row."""
    places = ByteMap(0, ((4, 4), (2, 16), (4, 1)))
    traced = TracedExport(
        (TracedParameter("p", Owners((0, 16), ((0,), (1,)), 32)),),
        {"t": TracedTensor(torch.uint8, (4, 8), (Origin(0, places),))},
    )
    layout = BucketLayout((BucketTensor("t", (4, 8), torch.uint8, 8),), 40)
    encoded = weight_map_of([Bucket.of(layout, is_last=True)], traced)
    weight_map = decode_weight_map(encoded.data)
    assert len(weight_map.buckets[0].pieces) == 1
    left, right = torch.arange(32, dtype=torch.uint8).chunk(2)
    bases = decode_bases(encode_bases([(0, 0), (1, 0)]))
    shards = ShardMemory(weight_map, bases, [left, right], CPU)
    expected = torch.cat((left.view(4, 4), right.view(4, 4)), dim=1).flatten()
    assert torch.equal(shards.source(0).packed(layout)[8:], expected)


def test_a_shard_that_a_rank_lacks_is_refused():
    traced = TracedExport((TracedParameter("p", held_by_all(4, 2)),), {})
    tables = [MemoryTable({"b": ()}, ((0, 0),)), MemoryTable({}, (NO_BYTES,))]
    assert bases_for(traced, tables, one_host(2), 0).data == encode_bases([(0, 0)])
    with pytest.raises(NotTraceable, match="trainer rank 1 holds no bytes of p"):
        bases_for(traced, tables, one_host(2), 1)


BAD_BASES = {
    "of another map": ([(0, 0)], "1 bases came for 2 shards"),
    "in a block that does not exist": ([(0, 0), (2, 0)], "shard 1, 4 bytes from byte 0 of block 2"),
    "past the end of the block": ([(0, 0), (1, 1)], "shard 1, 4 bytes from byte 1 of block 1"),
    "far past it": ([(0, 0), (1, 2**63 - 2)], "shard 1, 4 bytes from byte 9223372036854775806"),
    "negative": ([(0, 0), (1, -1)], "a base is negative"),
}


@pytest.mark.parametrize(("bases", "error"), BAD_BASES.values(), ids=BAD_BASES)
def test_bases_outside_of_the_blocks_are_refused(bases, error):
    weight_map = decode_weight_map(encode_weight_map([4, 4], []))
    blocks = [torch.zeros(4, dtype=torch.uint8) for _ in range(2)]
    with pytest.raises(WireError, match=error):
        ShardMemory(weight_map, decode_bases(encode_bases(bases)), blocks, CPU)


BAD_MAPS = {
    "a piece leaves its shard": ([4], [BucketPiece(0, 1, 0, 4)], "needs 5 bytes of shard 0"),
    "a piece is of no shard": ([4], [BucketPiece(1, 0, 0, 4)], "of shard 1, which has 0"),
    "a piece before the first byte": ([9], [BucketPiece(0, -1, 0, 4)], "not a weight map"),
    "a stride backwards": ([9], [BucketPiece(0, 0, 0, 8, ((8, -1),))], "not a weight map"),
    "a piece leaves the bucket": ([9], [BucketPiece(0, 0, 0, 9)], "leaves the bucket's 8 bytes"),
    "pieces overlap": ([9], [BucketPiece(0, 0, 0, 4), BucketPiece(0, 0, 2, 4)], "starts at byte 2"),
    "a negative size": ([-1], [], "not a weight map"),
}


@pytest.mark.parametrize(("shards", "pieces", "error"), BAD_MAPS.values(), ids=BAD_MAPS)
def test_a_map_that_reads_elsewhere_is_refused(shards, pieces, error):
    layout = BucketLayout((BucketTensor("t", (8,), torch.uint8, 0),), 8)
    encoded = encode_weight_map(shards, [(encode_layout(layout), pieces)])
    with pytest.raises(WireError, match=error):
        decode_weight_map(encoded)
