"""Exports that are traced while they are made, each rank in its own way. Four ranks on gloo.

As with Megatron-Bridge on one pipeline stage: a rank's own trace names the ranks of its own copy of
the model. Here every parameter is replicated.
"""

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from unit.route_ranks import EngineModel, engine_and_sync
from unit.serving_engine import synced
from unit.trainer_ranks import WORLD_SIZE
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
PULL = {"bucket_bytes": 2048, "routes": ["pull"]}


class Replicas:
    """Sources of one rank.

    Attributes:
        parameters: by name.
        fault: what is wrong, as the test names it.
        num_exports: those that were begun.
    """

    is_offloaded = False

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
            made[name] = MadeBy(name, 0, name)
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

    def trace_in_export(self, device):
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
    _, weight_sync = engine_and_sync(sources.exported().items(), **PULL)
    if fault == "copies differ" and dist.get_rank() == 3:
        sources.parameters[SECOND][5, 7] += 1
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


def syncs_of_emptied_parameters():
    """Returns the exports begun by each of four syncs, and what is wrong after the third.

    Before the third one the parameters lose their memory, as when verl's engine is told to move to
    the host. An export brings them back.
    """
    sources = Replicas("none")
    exchange = {**PULL, "routes": ["exchange"]}
    engine, weight_sync = engine_and_sync(sources.exported().items(), **exchange)
    parameters = sources.parameters = {n: t.clone() for n, t in sources.parameters.items()}
    on_host = {}

    def loading():
        for name, values in on_host.items():
            parameters[name].untyped_storage().resize_(values.nbytes)
            parameters[name].copy_(values)
        on_host.clear()
        yield from sources.export()

    num_exports, wrong = [], []
    for number in range(4):
        if number == 2:
            on_host.update({name: tensor + 1 for name, tensor in parameters.items()})
            for tensor in parameters.values():
                tensor.untyped_storage().resize_(0)
        before = sources.num_exports
        synced(weight_sync, Reexport(loading, sources=sources))
        num_exports.append(sources.num_exports - before)
        if number == 2:
            models = engine.models if engine is not None else []
            wrong = sorted({name for model in models for name in model.wrong(parameters)})
    return num_exports, wrong


def test_parameters_without_memory_are_exported(pool):
    for seen in pool.run(syncs_of_emptied_parameters):
        assert seen == ([1, 0, 1, 0], [])


class KeepingModel(EngineModel):
    """A model that keeps a tensor, so that its engine has no load plan."""

    def load_weights(self, weights):
        (_, self.kept), *_ = weights = list(weights)
        super().load_weights(weights)


def kept_by_a_sync(fails):
    """Returns how many parameters are kept that the trainer has replaced since.

    In the sync the export `fails`, or else no engine gets a load plan, so that nothing is learnt.
    """
    sources = Replicas("none")
    _, weight_sync = engine_and_sync(sources.exported().items(), model=KeepingModel, **PULL)

    def export():
        for number, pair in enumerate(sources.export()):
            if fails and number == len(sources.parameters) - 1:
                raise RuntimeError("no memory for the last one")
            yield pair

    expected = pytest.raises(WeightSyncError, match="no memory for the last one")
    with expected if fails else nullcontext():
        synced(weight_sync, Reexport(export, sources=sources))
    assert sources.num_traces, "nothing was traced"
    assert weight_sync._route.state.name == "UNTRIED", "something was learnt"
    kept = [weakref.ref(tensor) for tensor in sources.parameters.values()]
    sources.parameters = {name: t.clone() for name, t in sources.parameters.items()}
    gc.collect()
    return sum(each() is not None for each in kept)


@pytest.mark.parametrize("fails", [True, False])
def test_a_sync_without_learning_keeps_no_parameters(pool, fails):
    assert pool.run(kept_by_a_sync, fails) == [0] * WORLD_SIZE


class Experts:
    """Sources of one rank, which has one expert of each of two layers.

    Attributes:
        unlike: what the second layer exports in another order than the first: "experts",
            "equal experts", with the same bytes until the first step, the "vector", or "nothing".
            Of "nothing noted" the export does not note what makes its tensors.
    """

    is_offloaded = False

    def __init__(self, unlike):
        self.unlike, self.made, self.num_exports = unlike, {}, 0
        self.parameters = {f"l.{layer}.bias": torch.zeros(24) for layer in range(2)}
        for layer in range(2):
            torch.manual_seed(layer + (0 if unlike == "equal experts" else 10 * dist.get_rank()))
            self.parameters[f"l.{layer}.weight"] = torch.randn(16, 24)
        for tensor in self.parameters.values():
            tensor.untyped_storage().share_memory_()

    def __call__(self):
        return self.parameters

    def step(self):
        for name, tensor in self.parameters.items():
            is_replica = name.endswith("bias")
            torch.manual_seed(100 + len(name) + (0 if is_replica else dist.get_rank()))
            tensor.add_(torch.randn(tensor.shape))

    def convert(self, name, tensor):
        layer = int(name.split(".")[1])
        if name.endswith("bias"):
            is_unlike = layer == 1 and self.unlike == "vector"
            return [(name, tensor.view(4, 6).t().reshape(24) if is_unlike else tensor.clone())]
        gathered = [torch.empty_like(tensor) for _ in range(WORLD_SIZE)]
        dist.all_gather(gathered, tensor)
        order = (0, 1, 3, 2) if layer == 1 and "experts" in self.unlike else (0, 1, 2, 3)
        return [(f"l.{layer}.experts.{i}.weight", gathered[i]) for i in order]

    def converted(self):
        return [(name, self.convert(name, tensor)) for name, tensor in self.parameters.items()]

    def export(self):
        self.num_exports += 1
        made = self.made = {}
        for source, named in self.converted():
            for number, (name, tensor) in enumerate(named):
                noted = "" if self.unlike == "nothing noted" else source
                made[name] = MadeBy(noted, number, named[0][0])
                yield name, tensor

    def conversions(self):
        return [
            Conversion((name,), name[4:], (tensor,), partial(self.convert, name))
            for name, tensor in self.parameters.items()
        ]

    def how(self, device):
        return {"rank": dist.get_rank(), "world_size": WORLD_SIZE, "device": device}

    def trace(self, device):
        return trace_conversions(self.conversions(), **self.how(device))

    def trace_in_export(self, device):
        return trace_by_examples(self.conversions(), self.made, **self.how(device))


def two_syncs(unlike):
    """Returns the route's state, exports of the first sync, and what was wrong after the second."""
    sources = Experts(unlike)
    named = [pair for _, pairs in sources.converted() for pair in pairs]
    engine, weight_sync = engine_and_sync(named, **PULL)
    synced(weight_sync, Reexport(sources.export, sources=sources))
    num_exports = sources.num_exports
    sources.step()
    synced(weight_sync, Reexport(sources.export, sources=sources))
    new = dict(pair for _, pairs in sources.converted() for pair in pairs)
    models = engine.models if engine is not None else []
    wrong = sorted({name for model in models for name in model.wrong(new)})
    return weight_sync._route.state.name, num_exports, wrong


@pytest.mark.parametrize(
    ("unlike", "num_exports"),
    [("experts", 2), ("equal experts", 2), ("vector", 1), ("nothing", 1), ("nothing noted", 2)],
)
def test_a_conversion_unlike_its_example_is_found(pool, unlike, num_exports):
    """Equal experts and constant vectors have the same bytes by a wrong trace."""
    for seen in pool.run(two_syncs, unlike):
        assert seen == ("PROVEN", num_exports, [])
