"""A rehearsed `load_weights` changes nothing, whatever the loader does, and misses nothing."""

import resource
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from sglang_loader.common.layout import BucketLayout
from sglang_loader.load_plan.destinations import collect_destinations, first_difference
from sglang_loader.load_plan.verify import differing, snapshot
from sglang_loader.rehearsal import NotRehearsable, naming_refused, rehearse
from sglang_loader.rehearsal.findings import unwritten_parameters

BF16 = torch.bfloat16
SPECS = [("a", torch.float32, (4, 6)), ("b", BF16, (4,)), ("s", torch.float32, ())]


class Toy(nn.Module):
    """Three parameters and something derived; `load` is what each test gives it."""

    def __init__(self, load):
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 6).bfloat16(), requires_grad=False)
        self.b = nn.Parameter(torch.randn(4).bfloat16(), requires_grad=False)
        self.s = nn.Parameter(torch.randn(()).bfloat16(), requires_grad=False)
        self.derived = self.a.data.t().contiguous()
        self.cache = {"list": [torch.ones(3)], "count": 0}
        self._load = load

    def load_weights(self, weights):
        return self._load(self, weights)


def rehearsed(load, specs=SPECS):
    """The outcome; asserts that the model is as it was, bytes and bindings."""
    model = Toy(load)
    before = collect_destinations(model)
    content, attributes = snapshot(before), {**vars(model)}
    tensors = {name: getattr(model, name) for name in ("a", "b", "s", "derived")}
    try:
        return rehearse(model, specs)
    finally:
        assert first_difference(before, collect_destinations(model)) is None
        assert differing(before, content) == ()
        assert vars(model).keys() == attributes.keys()
        assert all(getattr(model, name) is tensor for name, tensor in tensors.items())
        assert model.cache["count"] == 0
        assert len(model.cache["list"]) == 1


def copy_all(model, weights):
    for name, tensor in weights:
        getattr(model, name).data.copy_(tensor)


def derive(model, weights):
    copy_all(model, weights)
    model.derived.copy_(model.a.data.t())


def rebind(model, weights):
    for name, tensor in weights:
        getattr(model, name).data = tensor.to(BF16)
    model.derived = model.a.data.t().contiguous()
    model.extra = torch.ones(2)
    model.cache["list"].append(model.extra)
    model.cache["count"] += 1


def replace_parameters(model, weights):
    for name, tensor in weights:
        setattr(model, name, nn.Parameter(tensor.clone(), requires_grad=False))


def change_the_sources(model, weights):
    for name, tensor in weights:
        tensor.add_(1)
        getattr(model, name).data.copy_(tensor.mul_(2))


def through_temporaries(model, weights):
    for name, tensor in weights:
        getattr(model, name).data.copy_(torch.cat([tensor.reshape(-1)]).view(tensor.shape) + 1)


def by_number(model, weights):
    for name, tensor in weights:
        param = getattr(model, name)
        param.data.fill_(tensor.item()) if param.numel() == 1 else param.data.copy_(tensor)


def in_a_pool(model, weights):
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(getattr(model, name).data.copy_, tensor) for name, tensor in weights]
        for future in futures:
            future.result()


def in_place_arithmetic(model, weights):
    for name, tensor in weights:
        getattr(model, name).data.zero_().add_(tensor)


@pytest.mark.parametrize(
    "load",
    [
        copy_all,
        derive,
        rebind,
        replace_parameters,
        change_the_sources,
        through_temporaries,
        by_number,
        in_a_pool,
        in_place_arithmetic,
    ],
)
def test_nothing_is_applied_and_everything_is_seen(load):
    seen = rehearsed(load)
    assert seen.errors == {}
    assert seen.failure is None
    assert all(seen.uses[name].is_applied for name, _, _ in SPECS)
    assert unwritten_parameters(seen) == ((), ())


def write_past_torch(model, weights):
    copy_all(model, weights)
    model.a.data.view(torch.int16).numpy()[0, 0] ^= 1


def draw(model, weights):
    for name, tensor in weights:
        getattr(model, name).data.copy_(tensor + torch.randn(tensor.shape))


@pytest.mark.parametrize(
    ("load", "reason"), [(write_past_torch, "could not be kept"), (draw, "random")]
)
def test_a_loader_that_escapes_makes_the_rehearsal_void(load, reason):
    model = Toy(load)
    with pytest.raises(NotRehearsable, match=reason):
        rehearse(model, SPECS)


def test_each_refused_tensor_is_named_and_the_others_go_on():
    def load(model, weights):
        params = dict(model.named_parameters())
        for name, tensor in weights:
            param = params[name]
            assert param.shape == tensor.shape, f"{name} is {list(tensor.shape)}"
            param.data.copy_(tensor)

    specs = [("x", BF16, (2,)), ("a", BF16, (6, 4)), ("b", BF16, (4,)), ("y", BF16, (2,))]
    seen = rehearsed(load, specs)
    assert {name: error.is_unknown for name, error in seen.errors.items()} == {
        "x": True,
        "a": False,
        "y": True,
    }
    assert seen.errors["a"].text == "AssertionError: a is [6, 4]"
    assert seen.uses["b"].is_applied
    assert unwritten_parameters(seen) == ((), ("a (engine)", "s (engine)"))


def test_a_loader_that_sorts_first_is_blamed_on_the_right_tensor():
    def place(param, tensor):
        param.data.copy_(tensor)

    def load(model, weights):
        for name, tensor in sorted(weights, key=lambda pair: pair[0]):
            place(getattr(model, name), tensor)

    seen = rehearsed(load, [("b", BF16, (5,)), ("s", BF16, ()), ("a", BF16, (4, 5))])
    assert set(seen.errors) == {"a", "b"}
    assert seen.uses["s"].is_applied


def test_an_error_at_no_tensor_is_told_as_such():
    def load(model, weights):
        copy_all(model, weights)
        raise ValueError("some weights were not initialised")

    assert rehearsed(load).failure == "ValueError: some weights were not initialised"


def test_a_shape_that_broadcasts_is_noticed():
    seen = rehearsed(copy_all, [("a", BF16, (1, 6)), ("b", BF16, (4,))])
    assert seen.uses["a"].is_broadcast
    assert not seen.uses["b"].is_broadcast


def test_sources_take_no_memory():
    def load(model, weights):
        for _, tensor in weights:
            assert tensor[-1, -1] == 0
            model.a.data.copy_(tensor[:4, :6])

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen = rehearsed(load, [(f"big.{i}", BF16, (1 << 16, 1 << 16)) for i in range(8)])
    assert len(seen.uses) == 8  # 64 GiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_an_error_of_a_load_names_every_tensor_that_is_refused():
    model = Toy(copy_all)
    specs = [("a", BF16, (4, 5)), ("b", BF16, (4,)), ("strange", BF16, (2,))]
    layout = BucketLayout.pack((name, shape, dtype) for name, dtype, shape in specs)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    with (
        pytest.raises(RuntimeError, match="size of tensor") as caught,
        naming_refused(model, layout),
    ):
        model.load_weights(layout.views(buffer))
    first, second = caught.value.__notes__
    assert first.startswith("load_weights refuses a [4, 5] (RuntimeError: ")
    assert second.startswith("load_weights refuses strange [2] (AttributeError: ")
