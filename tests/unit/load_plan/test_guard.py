"""A plan is only used where it was made: layouts, context and destinations, each with a reason."""

import pytest
import torch
from torch import nn

from sglang_loader.load_plan.destinations import (
    collect_destinations,
    first_difference,
)
from sglang_loader.load_plan.guard import DestinationProbe, context_change

CONTEXT = {"tp_rank": 0, "expert_map": ((2,), b"01"), "quantization": None}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"tp_rank": 1}, "tp_rank was 0, now 1"),
        ({"expert_map": ((2,), b"10")}, "expert_map was ((2,), b'01'), now ((2,), b'10')"),
        ({"quantization": "fp8"}, "quantization was None, now 'fp8'"),
        ({"ep_rank": 0}, "ep_rank was None, now 0"),
        (
            {"expert_map": bytes(99)},
            "expert_map was ((2,), b'01'), now b'" + 18 * "\\x00" + "\\x0...",
        ),
    ],
)
def test_another_context_is_named(change, reason):
    assert context_change(CONTEXT, {**CONTEXT, **change}) == reason


def test_a_context_that_lost_a_key_is_named():
    assert context_change({"tp_rank": 1}, {}) == "tp_rank was 1, now None"


CHANGED = "was rebound, or has another shape, stride or dtype"


def test_moved_and_new_tensors_are_noticed():
    """A walk of all tensors sees new ones, too; the probe looks where they were."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = collect_destinations(model)
    probe = DestinationProbe(model, before)

    def difference():
        return first_difference(before, collect_destinations(model))

    with torch.no_grad():
        model[0].weight.add_(1)
    assert (difference(), probe.mismatch()) == (None, None)
    model[0].extra = torch.zeros(3)
    assert difference() == "0.extra is new"
    del model[0].extra
    model[1].weight.data = model[1].weight.data.clone()
    assert "1.weight was rebound" in str(difference())
    assert probe.mismatch() == f"1.weight {CHANGED}"
    model[1] = nn.Identity()
    assert difference() == "1.weight is gone"
    assert probe.mismatch() == "module 1 was rebound"


def test_the_probe_notices_what_is_gone_or_exchanged():
    model = nn.Linear(2, 2)
    model.cache = [torch.zeros(2), torch.zeros(3)]
    probe = DestinationProbe(model, collect_destinations(model))
    assert probe.mismatch() is None
    last = model.cache.pop()
    assert probe.mismatch() == "cache[1] is gone"
    model.cache.append(last)
    assert probe.mismatch() is None
    model.bias = nn.Parameter(model.bias.data)
    assert probe.mismatch() == "bias was rebound"


CHANGES = {
    "transposed": lambda data: data.t(),
    "dtype": lambda data: data.view(torch.int32),
    "shape": lambda data: data[:3],
    "storage offset": lambda data: torch.from_numpy(data.numpy()),  # the same memory, from 0 on
    "memory": lambda data: torch.zeros(8, 4)[4:],
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_probe_notices_data_that_lies_otherwise(change):
    """A plan writes bytes: it would fill the same memory in the wrong order or format. The weight
    is square: its transpose has the same address, shape and dtype.
    """
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.zeros(8, 4)[4:], requires_grad=False)
    probe = DestinationProbe(model, collect_destinations(model))
    address, first = model.weight.data_ptr(), model.weight.data
    model.weight.data = CHANGES[change](first)
    assert (model.weight.data_ptr() != address) == change.startswith("memory")
    assert probe.mismatch() == f"weight {CHANGED}"
    model.weight.data = first
    assert probe.mismatch() is None


def test_the_probe_notices_later_modules_and_registrations():
    """The old module's tensors are where they were: a plan would go on filling those."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    probe = DestinationProbe(model, collect_destinations(model))
    old, model[0][0] = model[0][0], nn.Linear(2, 2)
    assert probe.mismatch() == "module 0.0 was rebound"
    model[0][0] = old
    assert probe.mismatch() is None
    for add in (
        lambda: model.append(nn.Identity()),
        lambda: model[1].register_buffer("scale", torch.ones(1)),
        lambda: model[1].register_parameter("extra", nn.Parameter(torch.ones(1))),
    ):
        probe = DestinationProbe(model, collect_destinations(model))
        assert probe.mismatch() is None
        add()
        assert probe.mismatch() == "a module, parameter or buffer was added or is gone"
    probe = DestinationProbe(model, collect_destinations(model))
    del model[1].scale
    assert probe.mismatch() == "1.scale is gone"


def of_a_class(model):
    class Loads(nn.Linear):
        def load_weights(self, weights):
            pass

    model[1].__class__ = Loads
    return lambda: setattr(Loads, "load_weights", lambda self, weights: None)


def replace_loader(model):
    model[0].weight.weight_loader = print
    return lambda: setattr(model[0].weight, "weight_loader", repr)


REPLACED = {
    "0.weight.weight_loader": replace_loader,
    "0.bias.weight_loader": lambda model: lambda: setattr(model[0].bias, "weight_loader", print),
    "1.load_weights": lambda model: lambda: setattr(model[1], "load_weights", print),
    "load_weights": lambda model: lambda: setattr(model, "load_weights", print),
    "scale._weight_loader": lambda model: lambda: setattr(model.scale, "_weight_loader", print),
    "Loads.load_weights": of_a_class,
}


@pytest.mark.parametrize("replaced", REPLACED)
def test_the_probe_notices_another_function_that_loads(replaced):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.register_buffer("scale", torch.ones(1))
    replace = REPLACED[replaced](model)
    probe = DestinationProbe(model, collect_destinations(model))
    assert probe.mismatch() is None
    replace()
    assert probe.mismatch() == f"{replaced} was replaced"


def test_a_bound_method_stays_the_same_when_reset():
    model = nn.Linear(2, 2)
    model.weight.weight_loader = model.extra_repr
    probe = DestinationProbe(model, collect_destinations(model))
    model.weight.weight_loader = model.extra_repr
    assert probe.mismatch() is None


def test_tied_and_viewed_tensors_are_one_destination():
    model = nn.Linear(4, 4)
    model.tied = model.weight
    model.row = model.weight.data[2]
    model.cache = {"k": [torch.zeros(2), (torch.ones(2),)]}
    model.meta = torch.zeros(2, device="meta")
    found = collect_destinations(model)
    assert found.names_of(0) == ("weight", "tied", "row")
    names = [s.name for s in found.storages]
    assert names == ["weight", "bias", "cache['k'][0]", "cache['k'][1][0]"]
    row = next(t for t in found.tensors if t.name == "row")
    assert (row.region.offset, row.region.shape) == (32, (4,))


def test_addresses_lead_back_to_storages():
    model = nn.Linear(4, 4)
    found = collect_destinations(model)
    assert found.find(model.weight.data[1].data_ptr()) == (0, 16)
    assert found.find(found.storages[0].data_ptr - 1) is None
