"""A module's state, and a quick look at whether it is still the same.

`state_dict` of a model with 30 B takes milliseconds in one piece. Its tree of modules, and the
tensors in it, are compared in small steps that fit into moments of waiting.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter, methodcaller
from typing import Any

import torch
from torch import nn

from verl_sglang_sync.sources.tensor_marks import TensorMarks

STEP = 64


class ModuleState:
    """What an export reads that starts from `state_dict`; call it for the tensors as they are now.

    Args:
        module: the trainer's.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> Mapping[str, torch.Tensor]:
        """The state, by name, with the parameters themselves."""
        state: dict[str, torch.Tensor] = self.module.state_dict(keep_vars=True)
        return state


class ModuleTree:
    """A module at one time: its submodules, by identity, and the tensors of its state.

    Args:
        module: just after its `state_dict` was taken, which may move it to the state that it saves.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._parts = [_Part(modules[i : i + STEP]) for i in range(0, len(modules), STEP)]

    @staticmethod
    def is_all_of(state: Mapping[str, torch.Tensor], module: nn.Module) -> bool:
        """True if the state is what is registered with the modules: no hook or method adds to it,
        leaves something out, or makes it up.
        """
        modules = list(module.modules())
        registered = {id(tensor) for tensor in _Registered.of(modules).tensors}
        own = any("state_dict" in vars(each) for each in modules)
        return not own and registered == {id(tensor) for tensor in state.values()}

    def compare(self, module: nn.Module) -> Generator[None, None, bool]:
        """Returns True if the same modules have the same tensors registered, in the same memory.

        False proves nothing: it may only be in another state than when its state was taken.
        """
        if self._parts[0].root() is not module:
            return False
        for part in self._parts:
            if not part.is_same():
                return False
            yield
        return True


class _Part:
    """Some of the modules."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        found = _Registered.of(modules)
        self._links = found.links
        self._children = [id(child) for child in found.children]
        self._marks = TensorMarks(found.tensors)

    def root(self) -> nn.Module | None:
        return self._modules[0]()

    def is_same(self) -> bool:
        modules = [reference() for reference in self._modules]
        if None in modules:
            return False
        found = _Registered.of(modules)
        return (
            found.links == self._links
            and list(map(id, found.children)) == self._children
            and self._marks.first_changed(found.tensors) is None
        )


@dataclass(frozen=True)
class _Registered:
    """What is registered with some modules, in columns: there are hundreds of them.

    Attributes:
        links: what decides which of the tensors have which names in the state; comparable.
        children: modules, or None.
        tensors: parameters, then buffers that are saved.
    """

    links: tuple[Any, ...]
    children: list[nn.Module | None]
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, modules: Sequence[nn.Module | None]) -> _Registered:
        states = list(map(vars, modules))  # past `__getattr__`
        columns = list(zip(*map(_REGISTRIES, states), strict=True))
        named_parameters, named_buffers, named_children, unsaved, *_ = columns
        parameters = list(chain.from_iterable(map(_VALUES, named_parameters)))
        links: tuple[Any, ...] = (
            list(map(type, modules)),
            ["state_dict" in state for state in states],
            [tensor is None for tensor in parameters],
            [_keys(column) for column in columns],
        )
        children = list(chain.from_iterable(map(_VALUES, named_children)))
        tensors = [tensor for tensor in parameters if tensor is not None]
        if any(named_buffers):
            saved = _saved_buffers(named_buffers, unsaved)
            links = (*links, [tensor is None for tensor in saved])
            tensors += [tensor for tensor in saved if tensor is not None]
        return cls(links, children, tensors)


_REGISTRIES = itemgetter(
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
)
_VALUES = methodcaller("values")


def _keys(column: Sequence[Collection[Any]]) -> tuple[list[bool], list[int], list[Any]]:
    """Which of these have something, how much, and all their keys."""
    some = list(filter(None, column))
    return list(map(bool, column)), list(map(len, some)), list(chain.from_iterable(some))


def _saved_buffers(
    buffers: Sequence[Mapping[str, torch.Tensor | None]], unsaved: Sequence[Collection[str]]
) -> list[torch.Tensor | None]:
    return [
        tensor
        for named, left_out in zip(buffers, unsaved, strict=True)
        for name, tensor in named.items()
        if name not in left_out
    ]
