"""Exports that convert parameter by parameter: traced by codes, merged, and compared with the
export.
"""

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed as dist

from sglang_loader.common.regions.compose import ByteMap
from support.assembled import misplaced
from unit.trainer_ranks import trainer_ranks
from verl_sglang_sync.sources.export_trace import (
    NotTraceable,
    TracedExport,
    TracedParameter,
    TracedTensor,
)
from verl_sglang_sync.sources.owners import Origin, Owners
from verl_sglang_sync.sources.source_map import TraceSummary, merge_traces
from verl_sglang_sync.verl.exports import bridge_sources

CPU = torch.device("cpu")


_groups = {}


def group_of(*rows):
    """This rank's group of ranks `rows`, which part the world."""
    if rows not in _groups:
        groups = [dist.new_group(list(row)) for row in rows]
        own = (g for g, row in zip(groups, rows, strict=True) if dist.get_rank() in row)
        _groups[rows] = next(own)
    return _groups[rows]


def gathered(tensor, group):
    parts = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def tensor_parallel():
    return group_of((0, 1), (2, 3))


def expert_parallel():
    return group_of((0, 2), (1, 3))


def fused(tensor):
    """Column-parallel rows, of which every third belongs to each of three tensors."""
    whole = torch.cat(gathered(tensor, tensor_parallel())).view(-1, 3, tensor.shape[1])
    for i, name in enumerate("qkv"):
        yield f"{name}.weight", whole[:, i].contiguous()


def row_parallel(tensor):
    """Columns put side by side; some of the rows are padding."""
    yield "o.weight", torch.cat(gathered(tensor, tensor_parallel()), dim=1)[:-1]


def experts(tensor):
    """Every expert parallel rank has another one, cut over tensor parallel ranks."""
    whole = torch.cat(gathered(tensor, tensor_parallel()))
    for i, expert in enumerate(gathered(whole, expert_parallel())):
        yield f"experts.{i}.weight", expert.t()


def stacked(first, second):
    """Two experts on every expert parallel rank, exported as one tensor, transposed."""
    local = [torch.cat(gathered(each, tensor_parallel())) for each in (first, second)]
    by_rank = zip(*(gathered(each, expert_parallel()) for each in local), strict=True)
    whole = torch.stack([expert for ranks_own in by_rank for expert in ranks_own])
    yield "experts.weight", whole.transpose(-1, -2).contiguous()


def replicated(tensor):
    yield "norm.weight", tensor


def from_the_second(tensor):
    """Nothing says that the ranks of a group have the same: the root's is exported."""
    tensor = tensor.clone()
    row = (0, 1) if dist.get_rank() < 2 else (2, 3)
    dist.broadcast(tensor, src=row[1], group=tensor_parallel())
    yield "bias", tensor


GOOD = (fused, row_parallel, experts, stacked, replicated, from_the_second)


def plus_one(tensor):
    yield "t", tensor + 1


def blend(tensor):
    first, second = gathered(tensor, tensor_parallel())
    yield "t", (first + second) // 2


def reduced(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor, group=tensor_parallel())
    yield "t", tensor


def as_float(tensor):
    yield "t", tensor.to(torch.float32)


def shuffled(tensor):
    yield "t", tensor.flatten()[torch.tensor([0, 5, 1, 3, 2, 4])]


def by_value(tensor):
    yield f"t{int(tensor.flatten()[0]) % 3}", tensor


def in_turns(first, second):
    yield "t", torch.stack((first, second), dim=-1)


def added(first, second):
    yield "t", first + second


def an_object(tensor):
    said = [None, None]
    dist.all_gather_object(said, "rank", group=tensor_parallel())
    yield "t", tensor


def parameter(shape, copies):
    """Values of this rank's own; equal on `copies` of ranks that hold replicas."""
    generator = torch.Generator().manual_seed(copies)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def sources():
    """By conversion; shards differ by rank as those of a trainer do, replicas are equal."""
    rank, tp = dist.get_rank(), dist.get_rank() % 2
    return {
        "fused": parameter((6, 4), tp),
        "row_parallel": parameter((5, 6), tp),
        "experts": parameter((4, 6), rank),
        "stacked.0": parameter((4, 6), 10 + rank),
        "stacked.1": parameter((4, 6), 20 + rank),
        "replicated": parameter((7,), 9),
        "from_the_second": parameter((3,), tp),
    }


def names_of(conversion):
    """Names among the sources of what it takes: its own, or several numbered ones."""
    num, name = conversion.__code__.co_argcount, conversion.__name__
    return (name,) if num == 1 else tuple(f"{name}.{i}" for i in range(num))


class State:
    """Sources that know how their export is traced."""

    def __init__(self, conversions):
        self.conversions = conversions

    def __call__(self):
        return sources()

    def trace(self, device):
        from verl_sglang_sync.sources.conversion_trace import Conversion, trace_conversions

        tensors, given = sources(), []
        for convert in self.conversions:
            names = names_of(convert)
            parameters = tuple(tensors[name] for name in names)
            given.append(Conversion(names, "a kind", parameters, convert))
        return trace_conversions(given, rank=dist.get_rank(), world_size=4, device=device)


def export_of(conversions):
    from verl_sglang_sync.sources.export import Reexport

    def export():
        tensors = sources()
        return (pair for f in conversions for pair in f(*(tensors[name] for name in names_of(f))))

    return Reexport(export, sources=State(conversions))


def trace_and_assemble():
    """Names of all tensors, of those that are not what the trace says, and who holds what."""
    from verl_sglang_sync.sources.source_map import SourceMap

    group, export = trainer_ranks(2)[0], export_of(GOOD)
    source_map = SourceMap(group, CPU)
    assert source_map.trace(export) is None
    traced = source_map.traced
    wrong = misplaced(export, source_map, group)
    holders = {
        name: [traced.parameters[origin.parameter].owners.holders for origin in tensor.origins]
        for name, tensor in traced.tensors.items()
    }
    return sorted(dict(export)), wrong, holders


def refused(conversion, kind):
    """Why it is not traced, after another of this kind that was."""
    from verl_sglang_sync.sources.conversion_trace import Conversion, trace_conversions

    tensor_parallel()
    zeros = torch.zeros(2, 3, dtype=torch.bfloat16)
    names = names_of(conversion)
    given = [
        Conversion(("good",), "a kind", (zeros,), lambda tensor: [("good", tensor)]),
        Conversion(names, kind, (zeros,) * len(names), conversion),
    ]
    with pytest.raises(NotTraceable) as error:
        trace_conversions(given, rank=dist.get_rank(), world_size=4, device=CPU)
    return str(error.value)


def test_every_tensor_equals_its_traced_bytes(pool):
    for names, wrong, holders in pool.run(trace_and_assemble):
        assert len(names) == 9
        assert wrong == []
        by_tensor_parallel_rank = ((0, 2), (1, 3))
        assert holders == {
            **{name: [by_tensor_parallel_rank] for name in ("q.weight", "k.weight", "v.weight")},
            "o.weight": [by_tensor_parallel_rank],
            "experts.0.weight": [((0,), (1,))],
            "experts.1.weight": [((2,), (3,))],
            "experts.weight": [((0,), (1,))] * 2 + [((2,), (3,))] * 2,
            "norm.weight": [((0, 1, 2, 3),)],
            "bias": [((1, 3),)],
        }


@pytest.mark.parametrize(
    ("conversion", "reason"),
    [
        (plus_one, "t is computed"),
        (blend, "t is computed"),
        (reduced, "the export communicates by c10d.allreduce_"),
        (as_float, "t is converted to another dtype, or computed: torch.float32"),
        (shuffled, "t is no strided set"),
        (by_value, "what by_value becomes depends on its values"),
        (an_object, "the export communicates"),
        (in_turns, "t has the bytes of several parameters in turns"),
        (added, "t is computed"),
    ],
)
def test_what_is_not_the_parameters_bytes_is_refused(pool, conversion, reason):
    assert all(reason in found for found in pool.run(refused, conversion, "another kind"))


@pytest.mark.parametrize("conversion", [plus_one, as_float, shuffled])
def test_a_parameter_with_another_conversion_is_refused(pool, conversion):
    pool.run(refused, conversion, "a kind")


def test_conversions_of_a_kind_may_differ():
    from verl_sglang_sync.sources.conversion_trace import Conversion, trace_conversions

    shard = torch.zeros(3, 3, dtype=torch.bfloat16)
    turned = {"b": True, "a": False, "c": False, "d": True}
    given = [
        Conversion(
            (name,),
            "a kind",
            (shard,),
            lambda t, name=name: [(name, t.T.contiguous() if turned[name] else t)],
        )
        for name in turned
    ]
    traced = trace_conversions(given, rank=0, world_size=1, device=CPU)
    dims = {name: traced.tensors[name].origins[0].bytes.dims for name in turned}
    assert dims["a"] == dims["c"] != dims["b"] == dims["d"]
    assert [parameter.source for parameter in traced.parameters] == list(turned)


def test_conversions_may_reuse_memory_or_give_nothing():
    from verl_sglang_sync.sources.conversion_trace import Conversion, trace_conversions

    shard, buffers = torch.zeros(3, 3, dtype=torch.bfloat16), []

    def convert(tensor, name, is_turned):
        if name == "c":  # an expert that comes with a later one
            return []
        buffers.append(buffers[-2] if buffers[1:] else torch.empty(3, 3, dtype=torch.int32))
        buffers[-1].copy_(tensor.T if is_turned else tensor)
        return [(name, buffers[-1])]

    given = [
        Conversion((name,), "a kind", (shard,), lambda t, name=name: convert(t, name, name == "b"))
        for name in "abcc"
    ]
    traced = trace_conversions(given, rank=0, world_size=1, device=CPU)
    dims = {name: tensor.origins[0].bytes.dims for name, tensor in traced.tensors.items()}
    assert dims == {"a": ((18, 1),), "b": ((3, 2), (3, 6), (2, 1))}


@pytest.mark.parametrize("number", [torch.int32, torch.int64])
def test_codes_beyond_32_bits_have_64(number, monkeypatch):
    """In one process: which integers are chosen, and that both can be scrambled."""
    from verl_sglang_sync.sources.conversion_trace import _Codes

    world_size = 4 if number == torch.int32 else 1 << 30
    codes = _Codes(torch.zeros(6), 1, 3, world_size)
    assert codes.dtype == number
    scrambled = codes.scramble(codes.own)
    assert torch.equal(codes.unscramble(scrambled), codes.own)
    assert not (scrambled == codes.own).any()
    there = codes.of_rank(scrambled, 1, is_scrambled=True)
    assert codes.unscramble(there).tolist() == [[6, 7, 8, 9, 10, 11]]


def test_parameters_that_differ_are_not_traced_together():
    from verl_sglang_sync.sources.conversion_trace import Conversion, trace_conversions

    given = Conversion(("a", "b"), "a kind", (torch.zeros(6), torch.zeros(4)), stacked)
    with pytest.raises(NotTraceable, match="b is exported together with a, which has another"):
        trace_conversions([given], rank=0, world_size=4, device=CPU)


def test_ranks_with_different_traces_agree_on_nothing():
    tensor = TracedTensor(torch.uint8, (4,), (Origin(0, ByteMap(0, ((4, 1),))),))
    first = TracedExport((TracedParameter("p", Owners((0,), ((0,),), 8)),), {"t": tensor})
    other = msgspec.structs.replace(tensor, origins=(Origin(0, ByteMap(4, ((4, 1),))),))
    with pytest.raises(NotTraceable, match="the ranks traced different exports: t differs"):
        merged_of([first, replace(first, tensors={"t": other})])


def merged_of(traces):
    """Every rank says all that it traced."""
    return merge_traces([TraceSummary.of(traced) for traced in traces], traces)


def test_ranks_that_traced_alike_hold_replicas():
    """The second and the third are known by their ranks alone."""
    tensor = TracedTensor(torch.uint8, (4,), (Origin(0, ByteMap(2, ((4, 1),))),))
    traces = [
        TracedExport((TracedParameter("p", Owners((0, 4), ((a,), (b,)), 8)),), {"t": tensor})
        for a, b in ((0, 1), (0, 1), (2, 3))
    ]
    summaries = [TraceSummary.of(traced) for traced in traces]
    assert len({each.structure_checksum for each in summaries}) == 1
    merged = merge_traces(summaries, [traces[0], None, None])
    assert merged == merged_of(traces)
    assert merged.parameters[0].owners.holders == ((0, 2), (1, 3))


def test_what_each_rank_knows_is_put_together():
    """Two pipeline stages, with parameters of one name."""
    tensor = TracedTensor(torch.uint8, (4,), (Origin(0, ByteMap(0, ((4, 1),))),))
    stages = [
        TracedExport((TracedParameter("p", Owners((0,), ((rank,),), 4)),), {name: tensor})
        for rank, name in enumerate(("first", "second"))
    ]
    merged = merged_of(stages)
    assert [p.owners.holders for p in merged.parameters] == [((0,),), ((1,),)]
    assert [t.origins[0].parameter for t in merged.tensors.values()] == [0, 1]


@pytest.mark.parametrize(
    "other",
    [
        {"vanilla_bridge": True},
        {"peft_cls": object},
        {"_qat_enabled": True},
        {"bridge": SimpleNamespace(export_weight_dtype="fp8")},
    ],
)
def test_only_what_the_bridge_alone_exports_is_traced(other):
    bridged = {
        "vanilla_bridge": False,
        "peft_cls": None,
        "_qat_enabled": False,
        "bridge": SimpleNamespace(),
        "is_param_offload_enabled": True,
    }
    assert bridge_sources(SimpleNamespace(**bridged)).is_offloaded
    assert bridge_sources(SimpleNamespace(**bridged | other)) is None
    assert bridge_sources(SimpleNamespace(module=None)) is None
