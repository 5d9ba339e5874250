"""Plans that are inferred from traced layers: which buckets get one, and that it is the traced one.

All architectures: `tests/contract/test_load_plan_architectures`.
"""

from unittest import mock

import pytest
import torch
from torch import nn

from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.load_plan import layer_templates
from sglang_loader.load_plan.layer_templates import LayerTemplates
from sglang_loader.load_plan.verify import check_bucket
from sglang_loader.session import recording
from sglang_loader.session.model_loader import ModelLoader
from sglang_loader.session.recording import PlanRecorder
from support.plan_check import packed

ROWS, COLUMNS = 6, 4


class Layer(nn.Module):
    def __init__(self, rows=ROWS):
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(2 * rows, COLUMNS), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(rows), requires_grad=False)


class Model(nn.Module):
    """Three layers, whose loader fuses two tensors of each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])
        self.norm = nn.Parameter(torch.zeros(COLUMNS), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "norm.weight":
                self.norm.copy_(tensor)
                continue
            _, number, leaf, _ = name.split(".")
            self.load(int(number), self.layers[int(number)], leaf, tensor)

    def load(self, number, layer, leaf, tensor):
        if leaf == "s":
            layer.scale[: len(tensor)].copy_(tensor)
        else:
            rows = len(layer.fused) // 2
            layer.fused[rows * (leaf == "b") :][: len(tensor)].copy_(tensor)


class Offset(Model):
    """The loader adds one to a tensor."""

    def load(self, number, layer, leaf, tensor):
        super().load(number, layer, leaf, tensor + 1 if leaf == "s" else tensor)


class Deciding(Model):
    """Python reads the data of a parameter before it is loaded."""

    def load(self, number, layer, leaf, tensor):
        if layer.scale[0].item() >= 0:
            super().load(number, layer, leaf, tensor)


class Deriving(Model):
    """Each load derives a buffer of all layers from parameters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(ROWS))

    def load(self, number, layer, leaf, tensor):
        super().load(number, layer, leaf, tensor)
        self.largest.copy_(torch.stack([layer.scale for layer in self.layers]).amax(0))


class Reversing(Model):
    """The second layer is loaded otherwise than the first."""

    def load(self, number, layer, leaf, tensor):
        super().load(
            number, layer, {"a": "b", "b": "a"}.get(leaf, leaf) if number else leaf, tensor
        )


class SecondStage(Model):
    """The first layer is on another pipeline stage."""

    def __init__(self):
        super().__init__()
        self.layers[0] = nn.Identity()

    def load(self, number, layer, leaf, tensor):
        if isinstance(layer, Layer):
            super().load(number, layer, leaf, tensor)


class Wider(Model):
    """The third layer has one parameter more."""

    def __init__(self):
        super().__init__()
        self.layers[2].more = nn.Parameter(torch.zeros(2), requires_grad=False)


class Larger(Model):
    """The parameters of the third layer have room for more rows."""

    def __init__(self):
        super().__init__()
        self.layers[2] = Layer(2 * ROWS)


def layer(number, rows=ROWS, dtype=torch.float32, leaves=("a", "b", "s")):
    shapes = {"a": (rows, COLUMNS), "b": (rows, COLUMNS), "s": (rows,)}
    names = {leaf: f"layers.{number}.{leaf}.weight" for leaf in leaves}
    return [(names[leaf], torch.rand(shapes[leaf]).to(dtype)) for leaf in leaves]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(layer_templates, "MIN_TENSORS", 1)


def recorded(model, buckets):
    recorder = PlanRecorder(model)
    for bucket in buckets:
        recorder.record(*packed(bucket))
    return recorder


def traced(model, buckets):
    with mock.patch.object(LayerTemplates, "infer", return_value=None):
        return recorded(model, buckets)


NORM = [("norm.weight", torch.rand(COLUMNS))]
WHOLE = [layer(0), layer(1), layer(2), NORM]


@pytest.mark.parametrize(
    ("kind", "buckets", "num_inferred"),
    [
        (Model, WHOLE, 2),
        (Model, [layer(1), layer(0), layer(2)], 2),
        (Model, [layer(0, leaves="a"), layer(0, leaves="bs"), layer(1), layer(2)], 2),
        (Model, [layer(0), [*layer(1), *layer(2)]], 1),
        (Model, [layer(0), [*layer(1), *NORM], layer(2)], 1),
        (Model, [layer(0), layer(1, rows=2), layer(2)], 1),
        (Model, [layer(0), layer(1, dtype=torch.bfloat16), layer(2)], 1),
        (Offset, WHOLE, 0),
        (Deciding, WHOLE, 0),
        (Deriving, WHOLE, 0),
        (Wider, WHOLE, 1),
        (Larger, [layer(0), layer(1), layer(2)], 1),
        (SecondStage, WHOLE, 0),
    ],
)
def test_buckets_of_like_layers_get_inferred_plans(kind, buckets, num_inferred):
    recorder = recorded(kind(), buckets)
    assert recorder.num_inferred == num_inferred
    for got, expected in zip(recorder._buckets, traced(kind(), buckets)._buckets, strict=True):
        assert got.layout == expected.layout
        assert set(got.copies) == set(expected.copies)
        assert got.written == expected.written


def test_contradicting_layers_give_no_template():
    buckets = [layer(0), [*layer(1), *NORM], layer(2)]
    assert recorded(Model(), buckets).num_inferred == 1
    assert recorded(Reversing(), buckets).num_inferred == 0


def test_uses_of_inferred_buckets_are_the_traced_ones():
    model = Model()
    _, expected = PlanRecorder(model).trace(*packed(WHOLE[1]))
    recorder = recorded(model, WHOLE[:1])
    uses, reason = recorder.record(*packed(WHOLE[1]))
    assert reason is None and recorder.num_inferred == 1
    assert (uses.tensors, uses.unused) == (expected.tensors, expected.unused)
    assert {name: tuple(ranges) for name, ranges in uses.written.items()} == {
        name: tuple(ranges) for name, ranges in expected.written.items()
    }


def test_small_buckets_are_traced(monkeypatch):
    monkeypatch.setattr(layer_templates, "MIN_TENSORS", 4)
    assert recorded(Model(), WHOLE).num_inferred == 0


class Odd(Model):
    """The third layer, which is not traced, is loaded in a way of its own."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            for layer in self.layers:
                layer.scale.fill_(7.0)  # as it is launched
        self.register_buffer("buffer", torch.zeros(()))
        self.register_buffer("elsewhere", torch.zeros(ROWS))

    def load(self, number, layer, leaf, tensor):
        (self.load_oddly if number == 2 else super().load)(number, layer, leaf, tensor)

    def load_alike(self, layer, leaf, tensor):
        Model.load(self, 2, layer, leaf, tensor)


class Swapping(Odd):
    def load_oddly(self, number, layer, leaf, tensor):
        self.load_alike(layer, {"a": "b", "b": "a"}.get(leaf, leaf), tensor)


class Dropping(Odd):
    def load_oddly(self, number, layer, leaf, tensor):
        if leaf != "s":
            self.load_alike(layer, leaf, tensor)


class Misplacing(Odd):
    def load_oddly(self, number, layer, leaf, tensor):
        if leaf == "s":
            self.elsewhere.copy_(tensor)
        else:
            self.load_alike(layer, leaf, tensor)


class Summing(Odd):
    def load_oddly(self, number, layer, leaf, tensor):
        self.load_alike(layer, leaf, tensor)
        if leaf == "s":
            self.buffer.copy_(tensor.sum())


class Scaling(Odd):
    def load_oddly(self, number, layer, leaf, tensor):
        self.load_alike(layer, leaf, tensor * 2)


class Rebinding(Odd):
    def load_oddly(self, number, layer, leaf, tensor):
        if leaf == "s":
            layer.scale = nn.Parameter(tensor.clone(), requires_grad=False)
        else:
            self.load_alike(layer, leaf, tensor)


class ByNumber(Odd):
    def holds(self, tensor):
        return tensor.view(-1)[0].item() < 2

    def load_oddly(self, number, layer, leaf, tensor):
        self.load_alike(layer, leaf, tensor if self.holds(tensor) else -tensor)


class ByTruth(ByNumber):
    def holds(self, tensor):
        return bool((tensor < 2).all())


class ByList(ByNumber):
    def holds(self, tensor):
        return tensor.view(-1).tolist()[0] < 2


class ByEquality(ByNumber):
    def holds(self, tensor):
        return torch.equal(tensor, tensor.clamp(max=2))


ODD = [Swapping, Dropping, Misplacing, Summing, Scaling]
REFUSED = [Rebinding, ByNumber, ByTruth, ByList, ByEquality]


@pytest.mark.parametrize("kind", [*ODD, *REFUSED])
@pytest.mark.parametrize("alike", [False, True])
def test_an_odd_layer_is_traced_and_loaded_right(kind, alike):
    """Also if, in the first sync, two of its tensors have the same content."""
    model, eager = kind(), kind()
    loader, num_inferred = ModelLoader(model), []
    for sync in range(4):
        buckets = [layer(0), layer(1), layer(2), NORM]
        if alike and not sync:
            buckets[2][1][1].copy_(buckets[2][0][1])
        if sync == 3:  # other decisions
            buckets = [[(name, tensor + 3) for name, tensor in bucket] for bucket in buckets]
        loader.start({})
        for index, bucket in enumerate(buckets):
            layout, buffer = packed(bucket)
            loader.load(index, layout, BucketSource.flat(buffer))
            eager.load_weights([(name, tensor.clone()) for name, tensor in bucket])
        num_inferred.append(loader._recorder.num_inferred)
        loader.finish()
        held, expected = model.state_dict(), eager.state_dict()
        assert [name for name in held if not torch.equal(held[name], expected[name])] == []
    assert num_inferred[0] == 1, "the second layer alone"
    assert (loader.plan is None) is (kind in REFUSED)


class Passing(Model):
    """A layer leaves what the next one adds, if it is positive, and another takes it away."""

    def __init__(self):
        super().__init__()
        self.layers.append(Layer())
        self.register_buffer("passed", torch.zeros(ROWS))

    def load(self, number, layer, leaf, tensor):
        is_scale = leaf == "s"
        if is_scale and number == 2:
            tensor = tensor + self.passed.clamp(min=0)
        super().load(number, layer, leaf, tensor)
        if is_scale and number == 1:
            self.passed.copy_(tensor)
        elif is_scale and number == 3:
            self.passed.zero_()


@pytest.mark.parametrize(
    ("kind", "numbers", "is_cut"), [(Passing, range(4), False), (Misplacing, range(3), True)]
)
def test_what_layers_do_elsewhere_is_never_lost(kind, numbers, is_cut):
    """Not if it is undone before the sync ends, nor if a sync is cut and made again."""
    model, eager = kind(), kind()
    loader, buckets = ModelLoader(model), [layer(number) for number in numbers]
    for sync in range(3):
        if sync == 2:  # a cut sync is made again with the same weights
            buckets = [layer(number) for number in numbers]
        loader.start({})
        for index, bucket in enumerate(buckets):
            layout, buffer = packed(bucket)
            loader.load(index, layout, BucketSource.flat(buffer))
            eager.load_weights([(name, tensor.clone()) for name, tensor in bucket])
        if is_cut and not sync:
            continue
        loader.finish()
        held, expected = model.state_dict(), eager.state_dict()
        assert [name for name in held if not torch.equal(held[name], expected[name])] == []


def test_after_a_check_breaks_all_is_traced(monkeypatch):
    """The session fails, and makes its sync again."""

    def failing(*args, is_inferred=False):
        if is_inferred:
            raise torch.OutOfMemoryError("no memory left")
        return check_bucket(*args)

    monkeypatch.setattr(recording, "check_bucket", failing)
    recorder = recorded(Model(), WHOLE[:1])
    with pytest.raises(torch.OutOfMemoryError):
        recorder.record(*packed(WHOLE[1]))
    recorder.restart()
    reasons = [recorder.record(*packed(bucket))[1] for bucket in WHOLE]
    assert reasons == [None] * len(WHOLE)
    assert recorder.num_inferred == 0
