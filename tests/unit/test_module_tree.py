"""A module that is the same is recognised without its state; one that is not, never."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from verl_sglang_sync.sources.known_sources import KnownSources, SourcesChanged
from verl_sglang_sync.sources.module_tree import STEP, ModuleState, ModuleTree


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4, bias=False)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm: torch.Tensor = self.norm(self.linear(x))
        return norm


class PrefixedNorm(nn.LayerNorm):
    """Saves its weight under another name."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}gamma"] = self.weight


def _hand_over(layer: Layer) -> None:
    layer.norm.register_parameter("bias", layer.norm.weight)
    layer.norm.register_parameter("weight", None)


class CountedState(ModuleState):
    """Counts how often the state was taken."""

    num_calls = 0

    def __call__(self) -> Any:
        self.num_calls += 1
        return super().__call__()


def make_module() -> nn.Sequential:
    module = nn.Sequential(*(Layer() for _ in range(STEP)), nn.Linear(4, 4, bias=False))
    for layer in module[:-1]:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))


def is_same(tree: ModuleTree, module: nn.Module) -> bool:
    steps = tree.compare(module)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return bool(end.value)


def test_the_same_module_is_recognised_without_its_state() -> None:
    module = make_module()
    sources = CountedState(module)
    known = KnownSources(sources(), sources)
    for _ in range(3):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1)  # as an optimizer: in place
        module[3].cache = torch.zeros(5)  # is not saved
        later = CountedState(module)  # every export brings its own
        steps = list(known.checks(later))
        assert len(steps) > 2, "not in small steps"
        assert later.num_calls == 0


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "another parameter": lambda m: setattr(
        m[1].norm, "weight", nn.Parameter(m[1].norm.weight.detach().clone())
    ),
    "moved data": lambda m: setattr(m[1].scale, "data", m[1].scale.clone()),
    "another storage in the same place": lambda m: setattr(
        m[1], "scale", torch.from_dlpack(m[1].scale)
    ),
    "another dtype": lambda m: setattr(m[1], "scale", m[1].scale.half()),
    "another shape": lambda m: m[1].scale.resize_(1),
    "another submodule": lambda m: m[2].register_module("linear", nn.Linear(4, 4)),
    "one parameter less": lambda m: m[2].norm.register_parameter("weight", None),
    "a buffer more": lambda m: m[2].register_buffer("more", torch.ones(1)),
    "a tensor under another name": lambda m: _hand_over(m[2]),
    "another class": lambda m: setattr(m[2].norm, "__class__", PrefixedNorm),
    "a buffer that is saved now": lambda m: m[2]._non_persistent_buffers_set.clear(),
    "one layer less": lambda m: m.__delitem__(5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_the_state_is_noticed(change: str) -> None:
    module = make_module()
    sources = ModuleState(module)
    state = sources()
    known, tree = KnownSources(state, sources), ModuleTree(module)
    assert is_same(tree, module)
    CHANGES[change](module)
    assert not is_same(tree, module)
    with pytest.raises(SourcesChanged):
        list(known.checks(sources))


def test_a_tensor_that_moves_to_the_next_module_is_noticed() -> None:
    """All names and all tensors are in the order in which they were."""
    first, second = nn.Linear(2, 2), nn.Module()
    second.register_parameter("more", nn.Parameter(torch.ones(1)))
    module = nn.Sequential(first, second)
    tree = ModuleTree(module)
    assert is_same(tree, module)
    moved, kept = first._parameters.pop("bias"), dict(second._parameters)
    second._parameters.clear()
    second._parameters.update(bias=moved, **kept)
    assert not is_same(tree, module)


def test_another_module_of_the_same_kind_is_not_the_same() -> None:
    module, other = make_module(), make_module()
    known = KnownSources(ModuleState(module)(), ModuleState(module))
    with pytest.raises(SourcesChanged):
        list(known.checks(ModuleState(other)))


def _unshard(module: nn.Sequential) -> None:
    module.unshard()  # type: ignore[operator]


@pytest.mark.parametrize(
    "change", [_unshard, lambda module: module.register_state_dict_pre_hook(lambda *_: None)]
)
def test_what_only_looks_different_is_settled_by_the_state(
    change: Callable[[nn.Sequential], Any],
) -> None:
    """FSDP2 leaves its root gathered after a forward pass; taking the state shards it again."""
    module = make_module()
    sources = CountedState(module)
    known, tree = KnownSources(sources(), sources), ModuleTree(module)
    change(module)
    assert not is_same(tree, module)
    list(known.checks(sources))
    assert sources.num_calls == 2


def test_a_module_is_not_kept_alive() -> None:
    module = make_module()
    sources = ModuleState(module)
    tree = ModuleTree(sources.module)
    other = make_module()
    del module, sources
    gc.collect()
    assert not is_same(tree, other)
    assert tree._parts[0].root() is None


def _with_a_hook(module: nn.Sequential) -> Callable[[], None]:
    """A state that has a tensor which is registered nowhere."""
    hidden = {"hidden": torch.ones(3)}
    module[1].register_state_dict_post_hook(
        lambda _module, state, prefix, _local: state.update({f"{prefix}more": hidden["hidden"]})
    )
    return lambda: hidden.update(hidden=torch.ones(3))


def _with_its_own(module: nn.Sequential) -> Callable[[], None]:
    """A module of which one object makes up its state."""
    made = {"made": torch.ones(3)}
    module[1].state_dict = lambda *_, destination, prefix, **__: destination.update(
        {f"{prefix}made": made["made"]}
    )
    return lambda: made.update(made=torch.ones(3))


@pytest.mark.parametrize("spoil", [_with_a_hook, _with_its_own])
def test_a_state_that_is_not_what_is_registered_is_taken_every_time(
    spoil: Callable[[nn.Sequential], Callable[[], None]],
) -> None:
    module = make_module()
    change = spoil(module)
    sources = CountedState(module)
    known = KnownSources(sources(), sources)
    list(known.checks(sources))
    assert sources.num_calls == 2
    change()
    with pytest.raises(SourcesChanged):
        list(known.checks(sources))
