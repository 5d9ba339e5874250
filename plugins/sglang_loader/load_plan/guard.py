"""Decides, before every sync, whether a load plan still holds, and says in words why not.

`what_changed` compares the engine's context (plain values that may change while it lives, such as
the expert map) with the context of the plan. `DestinationProbe` checks that the model's modules and
tensors are where they were, and loaded by the same functions: under 1 ms for 30 B.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from sglang_loader.load_plan.destinations import Destinations, iterate_tensors


def what_changed(before: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """The first difference of two contexts; None if there is none."""
    for key in sorted({*before, *now}):
        if (old := before.get(key)) != (new := now.get(key)):
            return f"{key} was {_short(old)}, now {_short(new)}"
    return None


class DestinationProbe:
    """Notices a model whose tensors are no longer where the plan writes."""

    def __init__(self, model: nn.Module, destinations: Destinations) -> None:
        names = {tensor.name for tensor in destinations.tensors}
        tensors = [place for place in iterate_tensors(model) if place.name in names]
        self._places: list[tuple[str, Any, Any, object]] = [
            (f"module {path}.{name}".replace(" .", " "), module._modules, name, child)
            for path, module in model.named_modules()
            for name, child in module._modules.items()
        ]
        self._places += [
            (place.name, place.container, place.key, place.tensor) for place in tensors
        ]
        self._names = [place.name for place in tensors]
        self._tensors = [place.tensor for place in tensors]
        self._geometry = _geometry_of(self._tensors)
        self._registries = [
            registry
            for module in model.modules()
            for registry in (module._parameters, module._buffers, module._modules)
        ]
        self._sizes = list(map(len, self._registries))
        self._loaded = list(_with_loaders(model))
        self._loaders = self._loaders_now()

    def mismatch(self) -> str | None:
        """The first module, tensor or loading function that was replaced, added or removed, in
        words, or None.

        A tensor in a new attribute that is neither parameter nor buffer goes unnoticed.
        """
        for name, container, key, before in self._places:
            try:
                if container[key] is not before:
                    return f"{name} was rebound"
            except (KeyError, IndexError):
                return f"{name} is gone"
        if (now := _geometry_of(self._tensors)) != self._geometry:
            olds, news = zip(*self._geometry, strict=True), zip(*now, strict=True)
            pairs = zip(self._names, olds, news, strict=True)
            name = next(name for name, old, new in pairs if old != new)
            return f"{name} was rebound, or has another shape, stride or dtype"
        if list(map(len, self._registries)) != self._sizes:
            return "a module, parameter or buffer was added or is gone"
        if (loaders := self._loaders_now()) != self._loaders:
            changed = [now != before for now, before in zip(loaders, self._loaders, strict=True)]
            name, _, attribute = self._loaded[changed.index(True)]
            return f"{name}.{attribute}".lstrip(".") + " was replaced"
        return None

    def _loaders_now(self) -> list[object]:
        return [attributes.get(name) for _, attributes, name in self._loaded]


_TENSORS_LOADERS = ("weight_loader", "_weight_loader")
_MODULES_LOADERS = ("weight_loader", "load_weights")


def _with_loaders(model: nn.Module) -> Iterator[tuple[str, Mapping[str, object], str]]:
    """Yield the places where a function that loads weights is or could be: the name of a tensor,
    module or class, its attributes, and the attribute's name.
    """
    classes: dict[type, None] = {}
    for path, module in model.named_modules():
        dot = f"{path}." if path else ""
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is not None:
                    classes.update(dict.fromkeys(type(tensor).__mro__))
                    yield from ((dot + name, vars(tensor), each) for each in _TENSORS_LOADERS)
        classes.update(dict.fromkeys(type(module).__mro__))
        yield from ((path, vars(module), each) for each in _MODULES_LOADERS)
    for found in classes:
        names = dict.fromkeys((*_TENSORS_LOADERS, *_MODULES_LOADERS))
        yield from ((found.__name__, vars(found), each) for each in names)


def _geometry_of(tensors: Sequence[torch.Tensor]) -> tuple[list[object], ...]:
    """A list for each property of the tensors that `tensor.data = other` may change."""
    return (
        list(map(torch.Tensor.data_ptr, tensors)),
        list(map(torch.Tensor.storage_offset, tensors)),
        list(map(torch.Tensor.stride, tensors)),
        list(map(_SHAPE, tensors)),
        list(map(_DTYPE, tensors)),
    )


_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
