"""Exports that convert parameter by parameter: traced by codes, merged, and compared with the
export.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sglang_loader.common.regions.compose import ByteMap
from unit import conversion_ranks
from verl_sglang_sync.sources.export_trace import (
    NotTraceable,
    TracedExport,
    TracedParameter,
    TracedTensor,
)
from verl_sglang_sync.sources.source_map import NamedRanks, merged_traces
from verl_sglang_sync.sources.transfer_plan import Origin, Owners
from verl_sglang_sync.verl.exports import bridge_sources


def test_every_tensor_is_the_bytes_that_the_trace_names(pool):
    for names, wrong, holders in pool.run(conversion_ranks.trace_and_assemble):
        assert len(names) == 8
        assert wrong == []
        by_tensor_parallel_rank = ((0, 2), (1, 3))
        assert holders == {
            **dict.fromkeys(("q.weight", "k.weight", "v.weight"), by_tensor_parallel_rank),
            "o.weight": by_tensor_parallel_rank,
            "experts.0.weight": ((0,), (1,)),
            "experts.1.weight": ((2,), (3,)),
            "norm.weight": ((0, 1, 2, 3),),
            "bias": ((1, 3),),
        }


@pytest.mark.parametrize(
    ("conversion", "reason"),
    [
        ("plus_one", "t is computed"),
        ("blend", "t is computed"),
        ("reduced", "the export communicates by c10d.allreduce_"),
        ("as_float", "t is converted to another dtype, or computed: torch.float32"),
        ("shuffled", "t is no strided set"),
        ("by_value", "what by_value becomes depends on its values"),
        ("an_object", "the export communicates"),
    ],
)
def test_what_is_not_the_parameters_bytes_is_refused(pool, conversion, reason):
    for rank, found in enumerate(pool.run(conversion_ranks.refused, conversion)):
        assert reason in found, rank


@pytest.mark.parametrize("number", [torch.int32, torch.int64])
def test_codes_that_do_not_fit_32_bits_have_64(number, monkeypatch):
    """In one process: which integers are chosen, and that both can be scrambled."""
    from verl_sglang_sync.sources.conversion_trace import _Codes

    world_size = 4 if number == torch.int32 else 1 << 30
    codes = _Codes(torch.zeros(6), 3, world_size)
    assert codes.dtype == number
    scrambled = codes.scramble(codes.own)
    assert torch.equal(codes.unscramble(scrambled), codes.own)
    assert not (scrambled == codes.own).any()
    there = codes.of_rank(scrambled, 1, is_scrambled=True)
    assert codes.unscramble(there).tolist() == [6, 7, 8, 9, 10, 11]


def test_ranks_that_traced_a_tensor_differently_agree_on_nothing():
    tensor = TracedTensor(torch.uint8, (4,), Origin(0, ByteMap(0, ((4, 1),))))
    first = TracedExport((TracedParameter("p", Owners((0,), ((0,),), 8)),), {"t": tensor})
    other = replace(tensor, origin=Origin(0, ByteMap(4, ((4, 1),))))
    with pytest.raises(NotTraceable, match="the ranks traced different exports: t differs"):
        merged_of([first, replace(first, tensors={"t": other})])


def merged_of(traces):
    """Every rank says all that it traced."""
    return merged_traces([NamedRanks.of(traced) for traced in traces], traces)


def test_ranks_that_traced_alike_hold_replicas():
    """The second and the third are known by their ranks alone."""
    tensor = TracedTensor(torch.uint8, (4,), Origin(0, ByteMap(2, ((4, 1),))))
    traces = [
        TracedExport((TracedParameter("p", Owners((0, 4), ((a,), (b,)), 8)),), {"t": tensor})
        for a, b in ((0, 1), (0, 1), (2, 3))
    ]
    named = [NamedRanks.of(traced) for traced in traces]
    assert len({each.rest for each in named}) == 1
    merged = merged_traces(named, [traces[0], None, None])
    assert merged == merged_of(traces)
    assert merged.parameters[0].owners.holders == ((0, 2), (1, 3))


def test_what_each_rank_knows_is_put_together():
    """Two pipeline stages, with parameters of one name."""
    tensor = TracedTensor(torch.uint8, (4,), Origin(0, ByteMap(0, ((4, 1),))))
    stages = [
        TracedExport((TracedParameter("p", Owners((0,), ((rank,),), 4)),), {name: tensor})
        for rank, name in enumerate(("first", "second"))
    ]
    merged = merged_of(stages)
    assert [p.owners.holders for p in merged.parameters] == [((0,),), ((1,),)]
    assert [t.origin.parameter for t in merged.tensors.values()] == [0, 1]


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
    assert bridge_sources(SimpleNamespace(**bridged)).empties_storages
    assert bridge_sources(SimpleNamespace(**bridged | other)) is None
    assert bridge_sources(SimpleNamespace(module=None)) is None
