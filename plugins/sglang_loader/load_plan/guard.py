"""Decides, before every sync, whether a load plan still holds, and says in words why not.

Two questions, because they cost differently. `Fingerprint.mismatch` compares what the sender
announces (bucket layouts) and what the engine reports (`context`: TP and EP rank, expert map,
quantisation method, device, versions: whatever the caller puts there) with what the plan was
compiled for; that is a comparison of tuples. `DestinationProbe.mismatch` walks
the model again for a rebound parameter or moved memory (15 ms for 30 B), `quick_mismatch` only
looks where the modules and tensors were (under 1 ms).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_

import torch
from torch import nn

from sglang_loader.common.layout import BucketLayout
from sglang_loader.load_plan.destinations import (
    Destinations,
    collect_destinations,
    first_difference,
    iterate_tensors,
)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a plan was compiled for. `context` is a plain mapping of comparable values, sorted by
    key.
    """

    layouts: tuple[BucketLayout, ...]
    context: tuple[tuple[str, object], ...]

    @classmethod
    def of(cls, layouts: Sequence[BucketLayout], context: Mapping[str, object]) -> Fingerprint:
        """Freeze the layouts and the context of a sync; lists, dicts and tensors in `context` are
        frozen by value.
        """
        items = tuple((key, _freeze(context[key])) for key in sorted(context))
        return cls(tuple(layouts), items)

    def mismatch(
        self, layouts: Sequence[BucketLayout], context: Mapping[str, object]
    ) -> str | None:
        """The first reason why a sync with these layouts and this context may not use the plan, or
        None.
        """
        other = Fingerprint.of(layouts, context)
        if self.context != other.context:
            return _context_difference(dict(self.context), dict(other.context))
        if self.layouts == other.layouts:
            return None
        if len(self.layouts) != len(other.layouts):
            return f"the plan has {len(self.layouts)} buckets, the sync {len(other.layouts)}"
        for i, (mine, theirs) in enumerate(zip(self.layouts, other.layouts, strict=True)):
            if mine != theirs:
                return f"bucket {i}: {layout_difference(mine, theirs)}"
        raise AssertionError("layouts differ, yet no bucket does")


@dataclass(frozen=True, slots=True)
class _ModuleLink:
    """A module, and where it is registered."""

    path: str
    siblings: Mapping[str, nn.Module | None]
    name: str
    module: nn.Module | None


class DestinationProbe:
    """Notices a model whose tensors are no longer where the plan writes."""

    def __init__(self, model: nn.Module, destinations: Destinations) -> None:
        self._model = model
        self._destinations = destinations
        known = {tensor.name for tensor in destinations.tensors}
        places = [place for place in iterate_tensors(model) if place.name in known]
        self._places = places
        self._tensors = [place.tensor for place in places]
        self._geometry = _geometry_of(self._tensors)
        self._modules = [
            _ModuleLink(f"{path}.{name}".lstrip("."), module._modules, name, child)
            for path, module in model.named_modules()
            for name, child in module._modules.items()
        ]
        self._registries = [
            registry
            for module in model.modules()
            for registry in (module._parameters, module._buffers, module._modules)
        ]
        self._sizes = list(map(len, self._registries))

    def quick_mismatch(self) -> str | None:
        """`mismatch` for every sync: looks only where modules and tensors were, each under 1 µs.

        Blind to a tensor in a new attribute that is neither parameter nor buffer.
        """
        for link in self._modules:
            if link.siblings.get(link.name) is not link.module:
                return f"module {link.path} was replaced"
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

    def mismatch(self) -> str | None:
        """Which tensor was added, removed or changed its address since the plan was compiled; None:
        no tensor was. Walks all modules: about 10 µs for each tensor.
        """
        try:
            now = collect_destinations(self._model)
        except ValueError as error:
            return str(error)
        return first_difference(self._destinations, now)


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


def layout_difference(mine: BucketLayout, theirs: BucketLayout) -> str:
    """The first difference between two layouts in words."""
    for i, (have, got) in enumerate(zip(mine.tensors, theirs.tensors, strict=False)):
        if have != got:
            return f"tensor {i} was {have}, now {got}"
    if len(mine.tensors) != len(theirs.tensors):
        return f"it had {len(mine.tensors)} tensors, now {len(theirs.tensors)}"
    return f"it had {mine.nbytes} bytes, now {theirs.nbytes}"


def _context_difference(mine: dict[str, object], theirs: dict[str, object]) -> str:
    missing = object()
    for key in sorted(mine.keys() | theirs.keys()):
        have, got = mine.get(key, missing), theirs.get(key, missing)
        if have == got:
            continue
        if have is missing or got is missing:
            return f"{key} is {'new' if have is missing else 'gone'} in the context"
        return f"{key} was {_short(have)}, now {_short(got)}"
    raise AssertionError("contexts differ, yet no key does")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _freeze(value: object) -> object:
    if isinstance(value, torch.Tensor):
        # As bytes: an expert map has thousands of numbers, and is compared before every sync.
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return ("tensor", str(value.dtype), tuple(value.shape), raw)
    if isinstance(value, Mapping):
        return tuple((key, _freeze(value[key])) for key in sorted(value, key=repr))
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item) for item in value)
    if isinstance(value, (set, frozenset)):
        return tuple(sorted((_freeze(item) for item in value), key=repr))
    return value
