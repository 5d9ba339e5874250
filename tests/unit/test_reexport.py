"""An export that is made anew for every iteration, and verl's engines that return one."""

from types import SimpleNamespace

import pytest
import torch

from verl_sglang_sync.verl import exports as reexport
from verl_sglang_sync.verl.exports import (
    Reexport,
    is_repeatable,
    make_exports_repeatable,
    transformed,
)

WEIGHTS = [("a", torch.ones(2)), ("b", torch.zeros(3))]


@pytest.fixture
def engine_class():
    """verl's base class of training engines; what this test wraps is unwrapped after it."""
    from verl.workers.engine.base import BaseEngine

    yield BaseEngine
    for engine in reexport._subclasses(BaseEngine):
        method = vars(engine).get(reexport._METHOD)
        if hasattr(method, "__wrapped__"):
            setattr(engine, reexport._METHOD, method.__wrapped__)


def test_only_later_iterations_must_export_again():
    made = []

    def again():
        made.append(1)
        return iter(WEIGHTS)

    export = Reexport(again)
    assert list(export) == list(export) == WEIGHTS
    assert len(made) == 2
    export = Reexport(again, iter(WEIGHTS))
    assert list(export) == WEIGHTS
    assert len(made) == 2
    assert list(export) == WEIGHTS
    assert len(made) == 3


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (WEIGHTS, True),
        (dict(WEIGHTS).items(), True),
        (iter(WEIGHTS), False),
        (Reexport(list), True),
    ],
    ids=["list", "items", "iterator", "reexport"],
)
def test_what_can_be_repeated(weights, expected):
    assert is_repeatable(weights) is expected
    renamed = transformed(weights, lambda pairs: ((f"x.{name}", t) for name, t in pairs))
    assert is_repeatable(renamed) is expected
    first = [name for name, _ in renamed]
    assert [name for name, _ in renamed] == (first if expected else [])


def test_verls_engines_return_repeatable_exports_once_wrapped(engine_class):
    class Engine(engine_class):
        def __init__(self):
            self.calls = []

        def get_per_tensor_param(self, base_sync_done=False, **kwargs):
            self.calls.append(base_sync_done)
            if base_sync_done:
                return dict(WEIGHTS).items(), {"peft_type": "LORA", "r": 8}
            return iter(WEIGHTS), None

    class Derived(Engine):
        pass

    plain = Engine.get_per_tensor_param
    make_exports_repeatable()
    make_exports_repeatable()
    assert Engine.get_per_tensor_param.__wrapped__ is plain
    assert not hasattr(plain, "__wrapped__")
    engine = Derived()
    weights, peft_config = engine.get_per_tensor_param()
    assert peft_config is None
    assert engine.calls == [False]
    assert list(weights) == list(weights) == WEIGHTS
    assert engine.calls == [False, False]
    adapter, peft_config = engine.get_per_tensor_param(base_sync_done=True)
    assert peft_config == {"peft_type": "LORA", "r": 8}
    assert engine.calls == [False, False, True]
    assert list(adapter) == WEIGHTS
    assert engine.calls == [False, False, True]
    assert list(transformed(adapter, iter).base()) == WEIGHTS
    assert engine.calls == [False, False, True, False]


@pytest.mark.parametrize("around", ["", "_fsdp_wrapped_module"])
def test_merged_adapters_are_copied_before_unmerging(engine_class, around):
    """As FSDP2 does on one rank in bfloat16: the export yields the module's own memory."""

    class Engine(engine_class):
        def __init__(self):
            adapted = SimpleNamespace(peft_config={"default": {}})
            self.module = SimpleNamespace(**{around: adapted}) if around else adapted
            self.memory = torch.ones(2)

        def get_per_tensor_param(self, **kwargs):
            return self._merged(), None

        def _merged(self):
            self.memory.fill_(3)
            yield "a", self.memory
            self.memory.fill_(1)

    make_exports_repeatable()
    engine = Engine()
    export, _ = engine.get_per_tensor_param()
    for _ in range(2):
        [(name, tensor)] = list(export)
        assert (name, tensor.tolist()) == ("a", [3, 3])
        assert engine.memory.tolist() == [1, 1]
    assert export.sources is None
