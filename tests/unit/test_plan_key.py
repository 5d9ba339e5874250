"""The key of a saved load plan changes with each of its parts, and with nothing else."""

import functools
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import sglang_loader.session.plan_key as plan_key
from sglang_loader import upstream
from sglang_loader.load_plan.guard import loading_functions


class Config(SimpleNamespace):
    def to_dict(self):
        return vars(self)


class Layer(nn.Module):
    def __init__(self, flag=False):
        super().__init__()
        self.flag = flag
        self.weight = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.weight.weight_loader = load_plainly


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Config(hidden_size=2)
        self.layer = Layer()

    def load_weights(self, weights):
        dict(weights)


class OtherNet(Net):
    pass


def load_plainly(parameter, tensor):
    parameter.data.copy_(tensor)


def load_reversed(parameter, tensor):
    parameter.data.copy_(tensor.flip(0))


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """Stands for the facts of an engine's process, and leaves out SGLang's 2,500 files."""
    facts = {"launch": {"dtype": "bfloat16"}, "ranks": {"tp_rank": 0, "tp_size": 2}}
    monkeypatch.setattr(plan_key, "launch_facts", functools.partial(facts.get, "launch"))
    monkeypatch.setattr(plan_key, "rank_facts", functools.partial(facts.get, "ranks"))
    monkeypatch.setattr(plan_key, "sglang_version", "0.5.14".strip)
    monkeypatch.setattr(plan_key, "_packages", packages_of_tests)
    plan_key._sources_digest.cache_clear()
    yield facts
    plan_key._sources_digest.cache_clear()


def packages_of_tests(model):
    return {"loaders_of_a_user"} if "loaders_of_a_user" in sys.modules else set()


def key_of(model, **context):
    return plan_key.plan_key(model, {"quantization": "NoneType", **context})


def changed(before, after):
    return {part for part in {*before, *after} if before.get(part) != after.get(part)}


def test_equal_models_have_equal_keys():
    assert changed(key_of(Net()), key_of(Net())) == set()


def test_weights_are_no_part_of_the_key():
    model = Net()
    before = key_of(model)
    model.layer.weight.data.fill_(1)
    assert changed(before, key_of(model)) == set()


def test_folder_of_the_checkpoint_is_no_part():
    model = Net()
    before = key_of(model)
    model.config._name_or_path = "/another/folder"
    assert changed(before, key_of(model)) == set()
    model.config.text_config = {"_name_or_path": "/one", "hidden_size": 4}
    nested = key_of(model)
    model.config.text_config = {"_name_or_path": "/two", "hidden_size": 4}
    assert changed(nested, key_of(model)) == set()
    assert changed(before, nested) == {"model"}


def other_class(model, engine, monkeypatch):
    return OtherNet()


def other_config(model, engine, monkeypatch):
    model.config.hidden_size = 4
    return model


def other_sglang(model, engine, monkeypatch):
    monkeypatch.setattr(plan_key, "sglang_version", "0.5.17".strip)
    return model


def other_torch(model, engine, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99")
    return model


def other_rank(model, engine, monkeypatch):
    engine["ranks"] = {"tp_rank": 1, "tp_size": 2}
    return model


def other_tp_size(model, engine, monkeypatch):
    engine["ranks"] = {"tp_rank": 0, "tp_size": 4}
    return model


def other_argument(model, engine, monkeypatch):
    engine["launch"] = {"dtype": "float16"}
    return model


def other_variable(model, engine, monkeypatch):
    monkeypatch.setenv("SGLANG_ANY_FLAG", "1")
    return model


def other_flag(model, engine, monkeypatch):
    model.layer.flag = True
    return model


def other_loader(model, engine, monkeypatch):
    model.layer.weight.weight_loader = load_reversed
    return model


def other_method(model, engine, monkeypatch):
    def load_weights(self, weights):
        list(weights)

    monkeypatch.setattr(Net, "load_weights", load_weights)
    return model


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (other_class, "model"),
        (other_config, "model"),
        (other_sglang, "sglang"),
        (other_torch, "torch"),
        (other_rank, "ranks"),
        (other_tp_size, "ranks"),
        (other_argument, "launch"),
        (other_variable, "environment"),
        (other_flag, "modules"),
        (other_loader, "loaders"),
        (other_method, "loaders"),
    ],
)
def test_each_part_of_the_key_counts(change, part, engine, monkeypatch):
    model = Net()
    before = key_of(model)
    assert part in changed(before, key_of(change(model, engine, monkeypatch)))


def test_ports_and_memory_are_no_launch_facts(monkeypatch):
    arguments = SimpleNamespace(dtype="bfloat16", tp_size=2, handler=object())
    monkeypatch.setattr(upstream, "launch_arguments", lambda: arguments)
    facts = upstream.launch_facts()
    assert facts == {"dtype": "'bfloat16'", "tp_size": "2"}
    vars(arguments).update(port=1, random_seed=2, mem_fraction_static=0.3, log_level="error")
    assert upstream.launch_facts() == facts
    arguments.tp_size = 4
    assert upstream.launch_facts() != facts


def test_expert_map_is_a_part_of_the_key():
    assert changed(key_of(Net()), key_of(Net(), expert_map="moved")) == {"context"}


def test_source_files_are_a_part_of_the_key(tmp_path, monkeypatch):
    folder = tmp_path / "loaders_of_a_user"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("loaders_of_a_user")
    monkeypatch.setattr(plan_key.psutil.Process, "create_time", lambda process: float("inf"))
    before = key_of(Net())
    (folder / "more.py").write_text("FLAG = 1")
    plan_key._sources_digest.cache_clear()
    assert changed(before, key_of(Net())) == {"sources"}
    monkeypatch.undo()
    plan_key._sources_digest.cache_clear()
    sys.modules.pop("loaders_of_a_user")


def test_code_newer_than_the_process_has_no_key(tmp_path, monkeypatch):
    (tmp_path / "loaders_of_a_user.py").write_text("FLAG = 1")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("loaders_of_a_user")
    try:
        with pytest.raises(plan_key.CodeChanged, match=r"loaders_of_a_user\.py is newer"):
            key_of(Net())
    finally:
        sys.modules.pop("loaders_of_a_user")


def test_code_of_partials_and_methods_is_found():
    texts = [
        plan_key._function_text(function)
        for function in (functools.partial(load_plainly), Net().load_weights, load_plainly, None)
    ]
    assert len(set(texts)) == 4
    assert loading_functions(Net())
