"""A module's state, and a quick look at whether it is still the same.

`state_dict` of a model with 30 B takes milliseconds in one piece. Its tree of modules, and the
tensors in it, are compared in small steps that fit into moments of waiting.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from verl_sglang_sync.traced_export.tensor_marks import TensorMarks

STEP = 32


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
        registered = {id(tensor) for tensor in _tensors(modules)}
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
        self._links = [_links(module) for module in modules]
        self._marks = TensorMarks(_tensors(modules))

    def root(self) -> nn.Module | None:
        return self._modules[0]()

    def is_same(self) -> bool:
        modules = [reference() for reference in self._modules]
        alive = [module for module in modules if module is not None]
        return (
            len(alive) == len(modules)
            and list(map(_links, alive)) == self._links
            and self._marks.first_changed(_tensors(alive)) is None
        )


def _links(module: nn.Module) -> tuple[Any, ...]:
    """What of a module decides which of its tensors have which names in its state."""
    parts = vars(module)  # past `__getattr__`: there are hundreds of modules
    children = parts["_modules"]
    return (
        *(type(module), "state_dict" in parts),
        *(name for name, value in parts["_parameters"].items() if value is not None),
        None,
        *(name for name, value in parts["_buffers"].items() if value is not None),
        *(None, *children),
        *map(id, children.values()),
        *(*parts["_non_persistent_buffers_set"], None, *parts["_state_dict_hooks"], None),
        *parts["_state_dict_pre_hooks"],
    )


def _tensors(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Parameters and buffers that are saved."""
    found: list[torch.Tensor] = []
    for module in modules:
        found += [tensor for tensor in module._parameters.values() if tensor is not None]
        if module._buffers:
            unsaved = module._non_persistent_buffers_set
            found += [
                tensor
                for name, tensor in module._buffers.items()
                if tensor is not None and name not in unsaved
            ]
    return found
