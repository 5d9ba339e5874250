"""What is seen of a `load_weights` while it loads, and which tensors its errors name."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.load_plan.destinations import collect_destinations
from sglang_loader.session.findings import missing_tensors, view_of
from sglang_loader.session.model_loader import ModelLoader
from sglang_loader.session.recording import naming_tensors
from support.plan_check import packed

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
        self._load = load

    def load_weights(self, weights):
        return self._load(self, weights)


def bucket(specs):
    """A bucket of ones: (layout, source)."""
    layout, buffer = packed((name, torch.ones(shape, dtype=dtype)) for name, dtype, shape in specs)
    return layout, BucketSource.flat(buffer)


def loaded(load, specs=SPECS, *, uses_plan=False, times=1):
    """A model's loader after a sync of one bucket, and the model."""
    model = Toy(load)
    loader = ModelLoader(model)
    for _ in range(times):
        loader.start({}, uses_plan=uses_plan)
        loader.load(0, *bucket(specs))
        loader.finish()
    return loader, model


def missing_of(loader, model, published=None):
    """(surely missing, perhaps missing)."""
    return missing_tensors(loader.uses, collect_destinations(model), published)


def copy_all(model, weights):
    for name, tensor in weights:
        getattr(model, name).data.copy_(tensor)


def change_the_sources(model, weights):
    for name, tensor in weights:
        tensor.add_(1)
        getattr(model, name).data.copy_(tensor.mul_(2))


def by_number(model, weights):
    for name, tensor in weights:
        param = getattr(model, name)
        param.data.fill_(tensor.item()) if param.numel() == 1 else param.data.copy_(tensor)


def in_a_pool(model, weights):
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(getattr(model, name).data.copy_, tensor) for name, tensor in weights]
        for future in futures:
            future.result()


def bind_at_first(model, weights):
    for name, tensor in weights:
        if not hasattr(model, f"{name}_is_bound"):
            getattr(model, name).data = torch.empty(tensor.shape, dtype=BF16)
            setattr(model, f"{name}_is_bound", True)
        getattr(model, name).data.copy_(tensor)


@pytest.mark.parametrize("uses_plan", [False, True])
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    "load", [copy_all, change_the_sources, by_number, in_a_pool, bind_at_first]
)
def test_what_becomes_of_every_tensor_is_seen(load, times, uses_plan):
    loader, model = loaded(load, times=times, uses_plan=uses_plan)
    assert view_of(loader.uses).unused == frozenset()
    assert [uses.problem for uses in loader.uses] == [None]
    assert missing_of(loader, model) == ((), ())


def rebind(model, weights):
    for name, tensor in weights:
        getattr(model, name).data = tensor.to(BF16)


def write_past_torch(model, weights):
    copy_all(model, weights)
    model.a.data.view(torch.int16).numpy()[0, 0] ^= 1


def write_by_numpy(model, weights):
    for name, tensor in weights:
        getattr(model, name).data.view(torch.int16).numpy()[...] = tensor.bfloat16().view(
            torch.int16
        )


@pytest.mark.parametrize(
    ("load", "uses_plan", "reason"),
    [
        (rebind, False, "was rebound"),
        (rebind, True, "rebound"),
        (write_past_torch, True, "differ from what load_weights loads"),
        (write_past_torch, False, "a may be written through its numpy, unseen"),
        (write_by_numpy, False, "may be written through its numpy, unseen"),
        (write_by_numpy, True, "Python reads the data of"),
    ],
)
def test_what_cannot_be_seen_is_told(load, uses_plan, reason):
    loader, _ = loaded(load, uses_plan=uses_plan)
    known = str(loader.uses[0].problem) + str(loader.finish().reason)
    assert reason in known


def test_an_unread_tensor_leaves_its_parameter_missing():
    def load(model, weights):
        copy_all(model, ((name, tensor) for name, tensor in weights if name != "b"))

    loader, model = loaded(load)
    assert view_of(loader.uses).unused == frozenset({"b"})
    assert missing_of(loader, model) == ((), ("b (engine)",))


def test_parts_and_broadcast_shapes_are_noticed():
    def load(model, weights):
        given = dict(weights)
        model.a.data.copy_(given["a"])
        model.b.data.copy_(given["b"][2:6])

    view = view_of(loaded(load, [("a", BF16, (1, 6)), ("b", BF16, (8,))])[0].uses)
    assert view.clashes == {"a": "smaller than what it would fill"}
    (part,) = view.partial["b"]
    assert (part.offset, part.shape) == (4, (4,))


class Layers(nn.Module):
    """Two layers with a fused parameter each, a padded embedding, and a norm."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.embed = nn.Module()
        self.model.embed.weight = nn.Parameter(torch.zeros(10, 4), requires_grad=False)
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.model.layers:
            layer.attn = nn.Module()
            layer.attn.qk = nn.Module()
            layer.attn.qk.weight = nn.Parameter(torch.zeros(8, 4), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name.endswith("embed.weight"):
                self.model.embed.weight.data[:8].copy_(tensor)
            elif "layers.2" not in name:
                layer = self.model.layers[int(name.split("layers.")[1][0])]
                start = 0 if ".q." in name else 4
                layer.attn.qk.weight.data[start : start + 4].copy_(tensor)


@pytest.mark.parametrize("prefix", ["model", "model.language_model"])
def test_what_is_missing_goes_by_the_published_checkpoint(prefix):
    """A third layer that the engine drops, and a row that no checkpoint has, are normal."""
    names = [f"{prefix}.layers.{i}.attn.{part}.weight" for i in range(3) for part in "qk"]
    specs = [(name, torch.float32, (4, 4)) for name in names]
    specs.append((f"{prefix}.embed.weight", torch.float32, (8, 4)))
    published = {spec[0]: spec for spec in specs}

    def missing(*lost, known=published):
        model = Layers()
        loader = ModelLoader(model)
        loader.start({}, uses_plan=False)
        sent = [spec for spec in specs if not spec[0].endswith(lost)]
        loader.load(0, *bucket(sent))
        return missing_of(loader, model, known)

    k = "layers.1.attn.k.weight"
    assert missing("none") == ((), ())
    assert missing("layers.2.attn.q.weight", "layers.2.attn.k.weight")[0] == ()
    assert missing(k) == ((f"{prefix}.{k}",), ())
    assert missing("attn.k.weight")[0] == (names[1], names[3])
    assert missing(k, known=None)[0] == ("model.layers.1.attn.qk.weight (engine)",)
    assert missing("attn.k.weight", known=None)[0] == ()
    assert len(missing("attn.k.weight", known=None)[1]) == 3
    assert missing("embed.weight")[0] == (f"{prefix}.embed.weight",)


def test_errors_of_tensors_without_memory_stay_unchanged():
    def load(model, weights):
        abstract = torch.sparse_coo_tensor(torch.zeros(1, 0), torch.zeros(0), (3,))
        raise KeyError(next(iter(weights))[0], abstract.shape)

    layout, source = bucket(SPECS)
    with pytest.raises(KeyError, match="'a'") as caught:
        naming_tensors(Toy(load))(layout.views(source.packed(layout)))
    assert caught.value.__notes__[0].startswith("load_weights failed at a [4, 6]: KeyError")


def test_an_error_before_any_tensor_says_so():
    def load(model, weights):
        raise ValueError("not initialised")

    with pytest.raises(ValueError, match="not initialised") as caught:
        naming_tensors(Toy(load))([])
    assert caught.value.__notes__ == [
        "load_weights failed at no tensor: ValueError('not initialised')"
    ]
