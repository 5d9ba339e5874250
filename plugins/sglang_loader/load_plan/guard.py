"""Decides, before every sync, whether a load plan still holds, and says in words why not.

`what_changed` compares what of the engine can change while it lives (its context: plain values, the
expert map among them) with what that was when the plan was made. `DestinationProbe` looks whether
the model's modules and tensors are where they were: under 1 ms for 30 B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, is_

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
        known = {tensor.name for tensor in destinations.tensors}
        self._places = [place for place in iterate_tensors(model) if place.name in known]
        self._tensors = [place.tensor for place in self._places]
        self._geometry = _geometry_of(self._tensors)
        self._modules = [
            (f"{path}.{name}".lstrip("."), module._modules, name, child)
            for path, module in model.named_modules()
            for name, child in module._modules.items()
        ]
        self._registries = [
            registry
            for module in model.modules()
            for registry in (module._parameters, module._buffers, module._modules)
        ]
        self._sizes = list(map(len, self._registries))

    def mismatch(self) -> str | None:
        """Which module or tensor is not where and what it was; None: all are. Each is under 1 µs.

        Blind to a tensor in a new attribute that is neither parameter nor buffer.
        """
        for path, siblings, name, module in self._modules:
            if siblings.get(name) is not module:
                return f"module {path} was replaced"
        now = []
        for place in self._places:
            try:
                now.append(place.container[place.key])
            except (KeyError, IndexError):
                return f"{place.name} is gone"
        if not all(map(is_, now, self._tensors)) or _geometry_of(now) != self._geometry:
            return self._difference(now)
        if list(map(len, self._registries)) != self._sizes:
            return "a module, parameter or buffer was added or is gone"
        return None

    def _difference(self, now: Sequence[torch.Tensor]) -> str:
        """Which of the tensors is not what or where it was."""
        geometry = zip(*_geometry_of(now), strict=True)
        known = zip(*self._geometry, strict=True)
        for place, tensor, found, before in zip(self._places, now, geometry, known, strict=True):
            if tensor is not place.tensor or found != before:
                return f"{place.name} was rebound, or has another shape, stride or dtype"
        raise AssertionError("tensors differ, yet none does")


def _geometry_of(tensors: Sequence[torch.Tensor]) -> tuple[list[object], ...]:
    """Where the tensors' elements lie and what they are, which `tensor.data = other` changes; by
    columns: a list for each property."""
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
