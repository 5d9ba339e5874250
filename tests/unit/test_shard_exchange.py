"""Trainer ranks fill arranged buffers from their shards: real FSDP2 and verl's export, on gloo."""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sglang_loader.common.layout import WireError
from unit import route_ranks
from unit.route_ranks import (
    BUCKET_BYTES,
    CPU,
    Rank,
    export_of,
    sharded,
)
from unit.strided_moves import indices
from unit.trainer_ranks import WORLD_SIZE, trainer_ranks
from verl_sglang_sync.sources import source_map


class ExchangeRank(Rank):
    """A rank whose shards are exchanged."""

    def __init__(self, **options):
        super().__init__("exchange", **options)

    def sync_without_room(self, number):
        """A sync in which the packing of one round fails on rank 1."""
        broken = self.route._sending.sender._copies[number]
        fails = mock.Mock(side_effect=MemoryError("no room to pack"))
        works = broken.between
        with mock.patch.object(broken, "between", fails if dist.get_rank() == 1 else works):
            self.sync()

    def sync_with_spoiled_origins(self):
        """A sync in which what is traced says of one tensor that it is another."""
        with spoiled_origins():
            self.sync()

    def trace_anew(self):
        """As another route might, before the exchange has looked at the parameters."""
        assert self.route._source_map.trace(self.export) is None


@contextmanager
def spoiled_origins():
    """What is traced says of one tensor that it is another."""
    trace = source_map.trace_export

    def spoiled(*args, **kwargs):
        traced = trace(*args, **kwargs)
        name = "model.layers.1.mlp.experts.2.up_proj.weight"
        other = traced.tensors[name.replace("up_proj", "gate_proj")]
        return replace(traced, tensors={**traced.tensors, name: other})

    with mock.patch.object(source_map, "trace_export", spoiled):
        yield


def _each(change):
    return lambda weights: ((name, change(tensor)) for name, tensor in weights)


def _reduced(tensor):
    dist.all_reduce(tensor)
    return tensor


def _swapped_on_rank_1(weights):
    for name, tensor in weights:
        swaps = {"gate_proj": "up_proj", "up_proj": "gate_proj"} if dist.get_rank() == 1 else {}
        for old, new in swaps.items():
            if f".{old}." in name:
                name = name.replace(old, new)
                break
        yield name, tensor


def _broken_on_rank_3(weights):
    for i, pair in enumerate(weights):
        if i == 4 and dist.get_rank() == 3:
            raise RuntimeError("the export of rank 3 broke")
        yield pair


COMPUTES = "computes with what it gathered: aten."
EXPORTS = {
    "casts": (
        _each(lambda tensor: tensor.to(torch.float16)),
        "converts torch.float32 to torch.float16",
    ),
    "adds": (_each(lambda tensor: tensor + 1), f"{COMPUTES}add.Tensor"),
    "adds in place": (_each(lambda tensor: tensor.add_(1)), f"{COMPUTES}add_.Tensor"),
    "reverses rows": (_each(lambda tensor: tensor.flip(0)), f"{COMPUTES}flip.default"),
    "reads values": (_each(lambda t: t[: int(t.sum())]), f"{COMPUTES}sum.default"),
    "communicates": (_each(_reduced), "communicates: c10d.allreduce_.default"),
    "brings its own": (
        lambda weights: [("extra", torch.ones(2)), *weights],
        "extra is computed by aten.ones.default",
    ),
    "repeats a shape": (_each(torch.empty_like), f"{COMPUTES}empty_like.default"),
    "breaks on rank 3": (_broken_on_rank_3, "rank 3: the export failed while it was traced"),
    "differs on rank 1": (_swapped_on_rank_1, "the ranks traced different exports"),
}
"""By what makes them untraceable: exports, and what is said."""


def refused_exports():
    """Why each of them is not traced."""
    from verl_sglang_sync.sources.export import transformed
    from verl_sglang_sync.sources.source_map import SourceMap

    export, group = export_of(sharded("moe")), trainer_ranks(2)[0]
    return {
        name: SourceMap(group, CPU).trace(transformed(export, change)).text
        for name, (change, _) in EXPORTS.items()
    }


def traced(tensor, step=lambda full: full):
    """The trace of an export of a parameter, of which something is made."""
    from verl_sglang_sync.sources.export_trace import trace_export

    def export():
        yield "w", step(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)

    world_size = dist.get_world_size()
    return trace_export(export(), sources=lambda: {"w": tensor}, world_size=world_size, device=CPU)


def refuse_parameters():
    """Those whose bytes are not in rows on one line of ranks; by what is said of them."""
    from verl_sglang_sync.sources.export_trace import NotTraceable

    line = init_device_mesh("cpu", (WORLD_SIZE,))
    square = init_device_mesh("cpu", (2, WORLD_SIZE // 2))
    weight = torch.arange(48.0).view(8, 6)
    replicated = distribute_tensor(weight, line, [Replicate()])
    two_dimensional = distribute_tensor(weight, square, [Replicate(), Shard(0)])
    for tensor in (replicated, weight):
        traced(tensor)
    for tensor, reason in (
        (distribute_tensor(weight, line, [Shard(1)]), r"it is placed as S\(1\)"),
        (two_dimensional, r"its mesh \(2, 2\) is not one line of all 4 ranks"),
        (replicated.t(), r"its memory has strides \(1, 6\)"),
        (weight.to("meta"), "w is on meta, the engine on cpu"),
    ):
        with pytest.raises(NotTraceable, match=reason):
            traced(tensor)


VIEWS_AND_COPIES = {
    "slice": lambda t: t[1:5, 2],
    "chunk": lambda t: t.chunk(2, dim=1)[1],
    "copied chunk": lambda t: t.chunk(2, dim=2)[1].contiguous(),
    "transposed": lambda t: t.transpose(0, 2),
    "transposed copy": lambda t: t.transpose(0, 2).contiguous(),
    "kept order": lambda t: t.transpose(0, 2).clone(),
    "view of a copy": lambda t: t[:, 1:3].contiguous()[2],
    "flat view of a copy": lambda t: t[:, :, :4].contiguous().view(-1)[16:80],
    "other dtype": lambda t: t[1].view(torch.int32),
    "expanded": lambda t: t[:, :1, :1].expand(6, 2, 8),
    "same device": lambda t: t.to("cpu", copy=True)[3],
}


def bytes_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def follow_views_and_copies():
    """Each is found where its bytes are, but for one whose bytes are in no order."""
    from verl_sglang_sync.sources.export_trace import NotTraceable

    full = torch.arange(6 * 4 * 8, dtype=torch.float32).view(6, 4, 8)
    weight = distribute_tensor(full, init_device_mesh("cpu", (WORLD_SIZE,)))
    for name, step in VIEWS_AND_COPIES.items():
        (origin,) = traced(weight, step).tensors["w"].origins
        source = origin.bytes
        found = bytes_of(full)[indices(source.offset, source.dims)]
        assert torch.equal(found, bytes_of(step(full))), name
    with pytest.raises(NotTraceable, match="in no regular, strided order"):
        traced(weight, lambda t: t[:, :, :4].contiguous().view(-1)[3:17])


DELIVER = "verl_sglang_sync.routes.table.transports._ExchangedRounds._deliver"


def play(pool, *steps, **options):
    return route_ranks.play(pool, ExchangeRank, options, *steps)


@pytest.mark.parametrize(
    ("kind", "dtype", "strategy"),
    [
        ("dense", "float32", "fsdp2"),
        ("tied", "bfloat16", "fsdp2"),
        ("moe", "bfloat16", "fsdp2"),
        ("moe", "bfloat16", "fsdp1"),
        ("vl", "float32", "fsdp2"),
    ],
)
def test_the_buffers_are_those_of_the_full_export(pool, kind, dtype, strategy):
    options = {"kind": kind, "dtype": dtype, "strategy": strategy}
    for seen in play(pool, "sync", *["step", "sync"] * 2, **options):
        assert seen["off"] is None
        assert seen["routes"] == ["export", "exchange", "exchange"]
        report = seen["report"]
        assert report["sent_bytes"] < report["payload_bytes"]
        assert report["staging_bytes"] < 4 * BUCKET_BYTES, "two buffers, and scratch"


def test_a_moved_shard_is_sent_from_its_place(pool):
    for seen in play(pool, "sync", *["step", ("move", 2, 0), "sync"] * 2, kind="dense"):
        assert seen["routes"] == ["export", "exchange", "exchange"]


def test_other_parameters_are_exported_and_traced_again(pool):
    """A parameter is of another kind on rank 2 alone, again and again."""
    moves = [("move", 2, 0, offset) for offset in range(1, 6)]
    steps = [step for move in moves for step in ("sync", "sync", move)]
    for seen in play(pool, *steps, kind="dense"):
        assert seen["routes"] == ["export", "exchange"] * 5
        assert seen["off"] is None


def test_another_traces_plan_is_not_exchanged(pool):
    for seen in play(pool, "sync", ("move", 2, 0, 1), "trace_anew", "sync", "sync", kind="dense"):
        assert seen["routes"] == ["export", "export", "exchange"]


def test_the_proof_is_repeated_when_it_is_due(pool):
    steps = [*["step", "sync"] * 4, ("move", 2, 0, 1), *["sync"] * 2]
    for seen in play(pool, *steps, kind="tied", prove=2):
        assert seen["routes"] == ["export", *["exchange"] * 3, "export", "exchange"]
        assert seen["proven"] == [True, True, None, True, True, True]
        assert seen["off"] is None


@pytest.mark.parametrize("number", [0, -1])
def test_a_rank_that_cannot_pack_costs_one_export(pool, number):
    steps = ("sync", ("sync_without_room", number), "sync", "sync")
    for seen in play(pool, *steps, kind="dense"):
        assert seen["errors"] == []
        assert seen["recoveries"] == ["EXPORT"]
        assert seen["routes"] == ["export", "export", "exchange", "exchange"]


def test_an_export_that_computes_is_not_traced(pool):
    answers = pool.run(refused_exports)
    assert answers == [answers[0]] * WORLD_SIZE
    for name, (_, reason) in EXPORTS.items():
        assert reason in answers[0][name]


def test_parameters_that_are_laid_out_otherwise_are_refused(pool):
    pool.run(refuse_parameters)


def test_views_and_copies_of_gathered_tensors_are_followed(pool):
    pool.run(follow_views_and_copies)


def test_a_wrong_origin_never_reaches_the_engine(pool):
    for seen in play(pool, "sync_with_spoiled_origins", "sync", kind="moe"):
        assert seen["routes"] == ["export", "export"]
        assert seen["state"] == "OFF"
        assert "up_proj.weight is exported with other bytes than its parameter has" in seen["off"]


def test_without_all_to_all_everything_is_exported(pool):
    refusal = RuntimeError("this backend has no all-to-all")
    fails = ("sync_failing", None, "torch.distributed.all_to_all_single", refusal)
    for seen in play(pool, fails, fails, fails, kind="tied"):
        assert seen["routes"] == ["export"] * 3 and seen["errors"] == []
        assert seen["state"] == "RETRY_LATER" and str(refusal) in seen["off"]


def test_a_failed_rank_still_sends_awaited_parts(pool):
    fails = ("sync_failing", 1, DELIVER, RuntimeError("given up"))
    for seen in play(pool, "sync", fails, *["sync"] * 2, kind="dense"):
        assert seen["errors"] == [] and seen["recoveries"] == ["EXPORT"]
        assert seen["routes"] == ["export", "export", "export", "exchange"], "its proof fails, too"


def test_rounds_that_no_rank_can_send_are_refused(pool):
    reject = "verl_sglang_sync.routes.table.shard_sending.decode_rounds"
    fails = ("sync_failing", 1, reject, WireError("noise"))
    for seen in play(pool, fails, *["step", "sync"] * 3, kind="dense"):
        assert seen["errors"] == []
        assert seen["routes"] == ["export", "export", "exchange", "exchange"]
