"""Exports that are traced while they are made, each rank in its own way. Four ranks on gloo.

As with Megatron-Bridge on one pipeline stage: a rank's own trace names the ranks of its own copy of
the model. Here every parameter is replicated.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from unit.route_ranks import TP, EngineModel
from unit.serving_engine import ServingEngine, colocated, synced
from unit.trainer_ranks import WORLD_SIZE, trainer_ranks
from verl_sglang_sync import WeightSyncError
from verl_sglang_sync.sources.conversion_trace import (
    Conversion,
    MadeBy,
    trace_by_examples,
    trace_conversions,
)
from verl_sglang_sync.sources.export import Reexport
from verl_sglang_sync.sources.export_trace import NotTraceable, TracedParameter
from verl_sglang_sync.sources.owners import Owners

FIRST, SECOND = "m.0.weight", "m.1.weight"


class Replicas:
    """Sources of one rank.

    Attributes:
        parameters: by name.
        fault: what is wrong, as the test names it.
        num_exports: those that were begun.
    """

    needs_an_export, is_offloaded = False, False

    def __init__(self, fault):
        torch.manual_seed(3)
        self.parameters = {f"m.{i}.weight": torch.randn(16, 24) for i in range(4)}
        self.fault, self.num_exports, self.num_traces, self.made = fault, 0, 0, {}
        for tensor in self.parameters.values():
            tensor.untyped_storage().share_memory_()

    def __call__(self):
        return self.parameters

    def export(self):
        self.num_exports += 1
        made = self.made = {}
        for name, tensor in self.exported().items():
            made[name] = MadeBy(name, 0)
            yield name, tensor

    def exported(self):
        """The second parameter is exported transposed with one of the faults."""
        converted = {**self.parameters}
        if self.fault == "one converts otherwise":
            converted[SECOND] = self.transposed(converted[SECOND])
        return converted

    def transposed(self, tensor):
        return tensor.t().contiguous().view(16, 24)

    def conversions(self):
        def convert(name, tensor):
            is_other = self.fault == "one converts otherwise" and name == SECOND
            return [(name, self.transposed(tensor) if is_other else tensor)]

        return [
            Conversion((name,), "a kind", (tensor,), partial(convert, name))
            for name, tensor in self.parameters.items()
        ]

    def trace_exported(self, device):
        self.num_traces += 1
        rank = dist.get_rank()
        if self.fault == "one rank's first trace fails" and rank == 2 and self.num_traces == 1:
            raise NotTraceable("it communicates")
        given = self.conversions(), self.made
        traced = trace_by_examples(*given, rank=rank, world_size=WORLD_SIZE, device=device)
        return self.spoiled(traced)

    def trace(self, device):
        self.num_traces += 1
        how = {"rank": dist.get_rank(), "world_size": WORLD_SIZE, "device": device}
        return self.spoiled(trace_conversions(self.conversions(), **how))

    def spoiled(self, traced):
        if self.fault != "the next rank has another tensor":
            return traced
        holder = (dist.get_rank() + 1) % WORLD_SIZE
        owners = Owners((0,), ((holder,),), self.parameters[FIRST].nbytes)
        wrong = TracedParameter(SECOND, owners)
        parameters = [wrong if each.source == FIRST else each for each in traced.parameters]
        return replace(traced, parameters=tuple(parameters))


def first_sync(fault):
    """Returns how it ended, the route's state and reason, and how often this rank exported."""
    sources = Replicas(fault)
    ranks, is_leader = trainer_ranks(TP)
    engine = ServingEngine(tp=TP) if is_leader else None
    if engine is not None:
        named = list(sources.exported().items())
        engine.models = [EngineModel(rank, named) for rank in range(TP)]
    if fault == "copies differ" and dist.get_rank() == 3:
        sources.parameters[SECOND][5, 7] += 1
    settings = {"bucket_bytes": 2048, "manifest_check": "off", "free_cache_engine": False}
    weight_sync = colocated(engine, "compiled", ranks, routes=["pull"], **settings)
    ending = "good"
    try:
        synced(weight_sync, Reexport(sources.export, sources=sources))
    except WeightSyncError as error:
        ending = type(error).__name__
    route = weight_sync._route
    return ending, route.state.name, str(route.reason), sources.num_exports


@pytest.mark.parametrize(
    ("fault", "ending", "state", "reason", "num_exports"),
    [
        ("none", "good", "PROVEN", "None", 1),
        ("copies differ", "CopiesDiffer", None, "", 1),
        ("one rank's first trace fails", "good", "PROVEN", "None", 2),
        ("one converts otherwise", "good", "PROVEN", "None", 2),
        (
            "the next rank has another tensor",
            "good",
            "OFF",
            f"{FIRST} is exported with other bytes than its parameter has",
            2,
        ),
    ],
)
def test_own_traces_are_merged_and_compared(pool, fault, ending, state, reason, num_exports):
    for seen in pool.run(first_sync, fault):
        assert seen[0] == ending
        assert state is None or seen[1] == state
        assert reason in seen[2]
        assert seen[3] == num_exports
