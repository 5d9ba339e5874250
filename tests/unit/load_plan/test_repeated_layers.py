"""One layer of each kind is traced; what its likes get is what a trace of them would give."""

import threading
from random import Random

import pytest
import torch
from torch import nn

from support.plan_check import packed, random_bucket
from support.recorded import Recorded, by_layer

SIZE = 4
NUM_LAYERS = 4
NAMES = ("up", "gate", "down", "scale")
NUM_LOADERS = 150


class Layer(nn.Module):
    """Its loader puts `up` and `gate` into one parameter, and casts `scale`."""

    def __init__(self, number, size=SIZE):
        super().__init__()
        self.number = number
        self.fused = nn.Parameter(torch.zeros(2 * size, size), requires_grad=False)
        self.down = nn.Parameter(torch.zeros(size, size), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(size, dtype=torch.bfloat16), requires_grad=False)

    def load(self, name, tensor):
        half = len(self.fused) // 2
        if name == "up":
            self.fused[:half].copy_(tensor)
        elif name == "gate":
            self.fused[half:].copy_(tensor)
        else:
            getattr(self, name).copy_(tensor)


class Model(nn.Module):
    @torch.no_grad()
    def __init__(self, layers=None):
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(3 * SIZE, SIZE), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(SIZE), requires_grad=False)
        self.layers = nn.ModuleList(layers or [Layer(number) for number in range(NUM_LAYERS)])
        generator = torch.Generator().manual_seed(7)
        for parameter in self.layers.parameters():  # an engine has weights, if only random ones
            parameter.copy_(torch.randn(parameter.shape, generator=generator))

    @torch.no_grad()
    def load_weights(self, weights):
        for name, tensor in weights:
            if name.startswith("layers."):
                _, number, own = name.split(".")
                self.layers[int(number)].load(own, tensor)
            elif name == "embedding":
                self.embedding[: len(tensor)].copy_(tensor)
                self.embedding[len(tensor) :].zero_()
            else:
                self.norm.copy_(tensor)


def weights_of(model, seed=0):
    """All tensors of a sync, in the order of a checkpoint."""
    torch.manual_seed(seed)
    named = [("embedding", torch.randn(2 * SIZE, SIZE))]
    for number, layer in enumerate(model.layers):
        size = len(layer.down)
        shapes = {"up": (size, size), "gate": (size, size), "down": (size, size), "scale": (size,)}
        named += [(f"layers.{number}.{name}", torch.randn(shapes[name])) for name in NAMES]
    return [*named, ("norm", torch.randn(SIZE))]


def check(model, buckets):
    """Record with and without repeated layers, compare, and return what was traced."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = Recorded(model, buckets)
    loaded = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    expected = Recorded(model, buckets, repeats=False)
    assert expected.traced == [*range(len(expected.uses))]
    assert found.reason == expected.reason
    assert found.plan == expected.plan
    assert found.uses == expected.uses
    # What a loader adds to is another thing after each load.
    adds = expected.plan is None or any(bucket.live_in for bucket in expected.plan.buckets)
    for name, tensor in model.state_dict().items():
        assert adds or torch.equal(loaded[name], tensor), name
    return found.traced


def test_one_layer_of_a_kind_is_traced():
    model = Model()
    assert check(model, by_layer(weights_of(model))) == [0, 1, 1 + NUM_LAYERS]


def test_buckets_may_end_within_a_layer():
    model = Model()
    weights = weights_of(model)
    buckets = [packed(weights[start : start + 5]) for start in range(0, len(weights), 5)]
    assert check(model, buckets) == [0, len(buckets) - 1]


class OtherClass(Layer):
    pass


class OtherLoader(Layer):
    """Its class is a `Layer`'s, to who asks for it."""

    def __init__(self, number):
        super().__init__(number)
        self.down.weight_loader = self.load if number < 2 else self.__init__


class Swaps(Layer):
    def load(self, name, tensor):
        swapped = {"up": "gate", "gate": "up"} if self.number % 2 else {}
        super().load(swapped.get(name, name), tensor)


class Adds(Layer):
    def load(self, name, tensor):
        if self.number == 2 and name == "down":
            self.down.add_(tensor)
        else:
            super().load(name, tensor)


class WritesUnseen(Layer):
    def load(self, name, tensor):
        super().load(name, tensor)
        if self.number == 2 and name == "scale":
            thread = threading.Thread(target=lambda: self.down[0].copy_(tensor))
            thread.start()
            thread.join()


class Scales(Layer):
    def load(self, name, tensor):
        super().load(name, tensor * 2 if self.number == 2 else tensor)


UNLIKE = {
    "another class": [Layer(0), Layer(1), OtherClass(2), Layer(3)],
    "another size": [Layer(0), Layer(1), Layer(2, 2 * SIZE), Layer(3)],
    "another loading function": [OtherLoader(number) for number in range(NUM_LAYERS)],
    "swapped tensors": [Swaps(number) for number in range(NUM_LAYERS)],
    "added, not copied": [Adds(number) for number in range(NUM_LAYERS)],
    "a write of a thread": [WritesUnseen(number) for number in range(NUM_LAYERS)],
    "scaled": [Scales(number) for number in range(NUM_LAYERS)],
}


@pytest.mark.parametrize("difference", UNLIKE)
def test_an_unlike_layer_is_traced(difference):
    model = Model(UNLIKE[difference])
    traced = check(model, by_layer(weights_of(model)))
    assert set(traced) & {2, 3}, "of layers 1 and 2 one is unlike"


def test_layers_that_share_memory_are_traced():
    model = Model()
    model.layers[2].down.data = model.layers[1].down.data
    assert 3 in check(model, by_layer(weights_of(model)))


class ReadsData(Layer):
    def load(self, name, tensor):
        if self.down.sum().item() != 0.5:
            super().load(name, tensor)


class Concatenates(Layer):
    """Needs `up` and `gate` in one call."""

    def load(self, name, tensor):
        self.kept = {**getattr(self, "kept", {}), name: tensor}
        if name in ("up", "gate") and {"up", "gate"} <= set(self.kept):
            self.fused.copy_(torch.cat([self.kept.pop("up"), self.kept.pop("gate")]))
        elif name not in ("up", "gate"):
            super().load(name, self.kept.pop(name))


def test_after_a_decision_by_data_all_is_traced():
    model = Model([ReadsData(number) for number in range(NUM_LAYERS)])
    buckets = by_layer(weights_of(model))
    assert check(model, buckets) == [*range(len(buckets))]


def test_tensors_that_are_loaded_together_stay_together():
    model = Model([Concatenates(number) for number in range(NUM_LAYERS)])
    weights = weights_of(model)
    assert check(model, by_layer(weights)) == [0, 1, 1 + NUM_LAYERS]
    between = next(at for at, (name, _) in enumerate(weights) if name == "layers.2.gate")
    buckets = [*by_layer(weights[: between - 1]), packed(weights[between - 1 : between])]
    found = Recorded(model, [*buckets, packed(weights[between:])])
    assert found.plan is None, "the loader keeps one until the other comes"


class Derives(Model):
    """Each call computes the sums of all layers."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.register_buffer("sum", torch.zeros(SIZE))

    @torch.no_grad()
    def load_weights(self, weights):
        super().load_weights(weights)
        for layer in self.layers:
            layer.sum.copy_(layer.down.sum(0))


def test_what_is_derived_of_layers_is_traced_everywhere():
    model = Derives()
    buckets = by_layer(weights_of(model))
    assert check(model, buckets) == [*range(len(buckets))]


class Random(Random):
    """Steps of a layer's loader, the same for all its tensors of a name."""

    def steps(self):
        ops = ("copy", "shift", "cast", "cat", "scale", "transpose", "fill", "add")
        return {name: [self.choice(ops) for _ in range(self.randint(1, 2))] for name in NAMES}


class RandomLayer(Layer):
    """Does what `steps` says, of tensors of one shape."""

    def __init__(self, number, steps):
        super().__init__(number)
        self.steps = steps
        for name in NAMES:
            setattr(self, name, nn.Parameter(torch.zeros(3, SIZE, SIZE), requires_grad=False))
        self.narrow = nn.Parameter(
            torch.zeros(SIZE, SIZE, dtype=torch.bfloat16), requires_grad=False
        )

    def load(self, name, tensor):
        own = getattr(self, name)
        for at, step in enumerate(self.steps[name]):
            if step == "copy":
                own[at].copy_(tensor)
            elif step == "shift":
                own[at + 1].view(-1)[: SIZE * 2].copy_(tensor.view(-1)[SIZE : SIZE * 3])
            elif step == "cast":
                self.narrow.copy_(tensor)
            elif step == "cat":
                own[:2].copy_(torch.cat([tensor, tensor.flip(0)]).view(2, SIZE, SIZE))
            elif step == "scale":
                own[at].copy_(tensor.mul_(2))
            elif step == "transpose":
                own[at].copy_(tensor.T)
            elif step == "fill":
                own[2].copy_(torch.ones(SIZE, SIZE))
            else:
                own[at].add_(tensor)


def test_random_layers_are_planned_as_if_traced():
    num_repeated = 0
    for seed in range(NUM_LOADERS):
        random = Random(seed)
        steps = random.steps()
        model = Model([RandomLayer(number, steps) for number in range(NUM_LAYERS)])
        if random.random() < 0.3:  # one does something else
            model.layers[random.randrange(NUM_LAYERS)].steps = random.steps()
        named = [("embedding", (2 * SIZE, SIZE), torch.float32)]
        for number in range(NUM_LAYERS):
            named += [(f"layers.{number}.{name}", (SIZE, SIZE), torch.float32) for name in NAMES]
        cuts = sorted(random.sample(range(1, len(named)), random.randint(2, 6)))
        parts = [named[a:b] for a, b in zip([0, *cuts], [*cuts, len(named)], strict=True)]
        buckets = [random_bucket(part, seed + at) for at, part in enumerate(parts)]
        traced = check(model, buckets)
        num_repeated += len(buckets) - len(traced)
    assert num_repeated > NUM_LOADERS // 4
