"""Check, before every sync, that a load plan still holds. The result is a reason, or None.

`context_change` compares the engine's context (plain values that may change while the engine lives,
such as the expert map) with the context of the plan. `DestinationProbe` checks the model's modules
and tensors: they must be at the same places, and loaded by the same functions. The probe takes
under 1 ms for 30 B.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from sglang_loader.load_plan.destinations import Destinations, iterate_tensors


def context_change(earlier: Mapping[str, object], current: Mapping[str, object]) -> str | None:
    """Return the first difference of two contexts, or None."""
    for key in sorted({*earlier, *current}):
        if (old := earlier.get(key)) != (new := current.get(key)):
            return f"{key} was {_short(old)}, now {_short(new)}"
    return None


class DestinationProbe:
    """A probe for tensors of a model that are no longer where the plan writes."""

    def __init__(self, model: nn.Module, destinations: Destinations) -> None:
        # Identities: each module and each tensor of the plan, with the container that holds it.
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
        # The geometry too: `tensor.data = other` keeps the identity of a tensor.
        self._names = [place.name for place in tensors]
        self._tensors = [place.tensor for place in tensors]
        self._geometry = _geometry_of(self._tensors)
        # Sizes of the registries show additions, the loading functions show patches.
        self._registries = [
            registry
            for module in model.modules()
            for registry in (module._parameters, module._buffers, module._modules)
        ]
        self._sizes = list(map(len, self._registries))
        self._loaded = list(_with_loaders(model))
        self._loaders = self._current_loaders()

    def mismatch(self) -> str | None:
        """Return a text about the first module, tensor or loading function that changed, or None.

        A change is a replacement, an addition or a removal. The probe does not notice a tensor in a
        new attribute that is neither parameter nor buffer.
        """
        # In this order: identities, geometry, sizes of registries, loading functions.
        for name, container, key, value in self._places:
            try:
                if container[key] is not value:
                    return f"{name} was rebound"
            except (KeyError, IndexError):
                return f"{name} is gone"
        if (geometry := _geometry_of(self._tensors)) != self._geometry:
            # The lists were compared as wholes. Only a mismatch needs the tensor's name.
            olds, news = zip(*self._geometry, strict=True), zip(*geometry, strict=True)
            pairs = zip(self._names, olds, news, strict=True)
            name = next(name for name, old, new in pairs if old != new)
            return f"{name} was rebound, or has another shape, stride or dtype"
        if list(map(len, self._registries)) != self._sizes:
            return "a module, parameter or buffer was added or is gone"
        if (loaders := self._current_loaders()) != self._loaders:
            changed = [new != old for new, old in zip(loaders, self._loaders, strict=True)]
            name, _, attribute = self._loaded[changed.index(True)]
            return f"{name}.{attribute}".lstrip(".") + " was replaced"
        return None

    def _current_loaders(self) -> list[object]:
        return [attributes.get(name) for _, attributes, name in self._loaded]


_TENSORS_LOADERS = ("weight_loader", "_weight_loader")
_MODULES_LOADERS = ("weight_loader", "load_weights")


def _with_loaders(model: nn.Module) -> Iterator[tuple[str, Mapping[str, object], str]]:
    """Yield the places where a function that loads weights is or could be.

    Each place is the name of a tensor, module or class, its attributes, and an attribute's name.
    """
    classes: dict[type, None] = {}
    for path, module in model.named_modules():
        dot = f"{path}." if path else ""
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is not None:
                    classes.update(dict.fromkeys(type(tensor).__mro__))
                    yield from ((dot + name, vars(tensor), loader) for loader in _TENSORS_LOADERS)
        classes.update(dict.fromkeys(type(module).__mro__))
        yield from ((path, vars(module), loader) for loader in _MODULES_LOADERS)
    for owner in classes:
        loaders = dict.fromkeys((*_TENSORS_LOADERS, *_MODULES_LOADERS))
        yield from ((owner.__name__, vars(owner), loader) for loader in loaders)


def loading_functions(model: nn.Module) -> list[object]:
    """Return all functions that load weights of the model, or None where one could be."""
    return [attributes.get(name) for _, attributes, name in _with_loaders(model)]


def _geometry_of(tensors: Sequence[torch.Tensor]) -> tuple[list[object], ...]:
    """Return a list for each property of the tensors that `tensor.data = other` may change."""
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
