"""Every storage that a model's modules can reach: the possible destinations of a weight update.

Parameters and buffers are not all. MLA keeps `w_kc` and `w_vc` as plain attributes, other modules
keep lists and dicts of tensors. `collect_destinations` walks modules, their attributes and nested
containers. The walk groups tensors by storage, so that tied weights and views are one destination.

A `Destinations` object holds strong references to the memory. As long as the object lives, none of
its addresses can be handed out again.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from types import FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sglang_loader.common.copies.strided import region_of
from sglang_loader.common.regions.geometry import Region
from sglang_loader.common.regions.intervals import Interval, contains, merge_runs

MAX_CONTAINER_DEPTH = 4
_MODULE_INTERNALS = frozenset({"_parameters", "_buffers", "_modules"})
_WITHOUT_TENSORS = frozenset({NoneType, bool, int, float, str, FunctionType, MethodType})
_CONTAINERS = frozenset({OrderedDict, dict, list, tuple})


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One reachable tensor: its path, its storage, and its place in the storage."""

    name: str
    kind: str
    storage: int
    dtype: torch.dtype
    region: Region

    def lies_in(self, ranges: Sequence[Interval]) -> bool:
        """Return True if all of its bytes are in sorted, disjoint byte ranges of its storage."""
        if contains(ranges, self.region.bounds()):
            return True
        return all(contains(ranges, run) for run in merge_runs([self.region.runs()]))


@dataclass(frozen=True, slots=True)
class StorageEntry:
    """One distinct storage. `name` is the first path that reaches the storage, and its key."""

    name: str
    data_ptr: int
    nbytes: int
    device: torch.device


@dataclass(frozen=True)
class Destinations:
    """The reachable tensors and storages of a model at one moment.

    Attributes:
        opaque: names of tensors without one plain strided storage, such as wrapper subclasses and
            sparse tensors. Nothing can be proved about these. A model that has any gets no plan.
    """

    storages: tuple[StorageEntry, ...]
    tensors: tuple[TensorEntry, ...]
    opaque: tuple[str, ...]
    keep_alive: tuple[torch.UntypedStorage, ...] = field(repr=False, compare=False)

    @cached_property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """The storages as flat uint8 tensors that share their memory."""
        with torch.inference_mode(False), torch.no_grad():
            return tuple(
                torch.empty(0, dtype=torch.uint8, device=raw.device).set_(raw)
                for raw in self.keep_alive
            )

    @cached_property
    def _spans(self) -> list[tuple[int, int, int]]:
        return sorted((s.data_ptr, s.data_ptr + s.nbytes, i) for i, s in enumerate(self.storages))

    def find(self, data_ptr: int) -> tuple[int, int] | None:
        """Return the storage index of an address, and the byte offset in the storage, or None."""
        at = bisect_right(self._spans, (data_ptr, sys.maxsize)) - 1
        if at < 0 or data_ptr >= self._spans[at][1]:
            return None
        return self._spans[at][2], data_ptr - self._spans[at][0]

    def names_of(self, storage: int) -> tuple[str, ...]:
        """Return every path that reaches this storage."""
        return tuple(t.name for t in self.tensors if t.storage == storage)


def collect_destinations(model: nn.Module, earlier: Destinations | None = None) -> Destinations:
    """Collect every storage that `model`'s modules reach. Empty and meta tensors are left out.

    The storages of an `earlier` collection keep their numbers. New storages get the next numbers.

    Raises:
        ValueError: two storages overlap in memory. A write to one would change the other unseen.
    """
    storages = list(earlier.storages) if earlier is not None else []
    keep_alive = list(earlier.keep_alive) if earlier is not None else []
    seen = {(s.data_ptr, s.nbytes): i for i, s in enumerate(storages)}
    tensors: list[TensorEntry] = []
    opaque: list[str] = []
    for place in iterate_tensors(model):
        name, tensor = place.name, place.tensor
        if tensor.device.type == "meta":  # has no bytes
            continue
        if tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor):
            opaque.append(name)
            continue
        raw = tensor.untyped_storage()
        if raw.nbytes() == 0 or raw.data_ptr() == 0:
            continue
        # Tied weights and views have the same storage, which is one destination.
        index = seen.setdefault((raw.data_ptr(), raw.nbytes()), len(storages))
        if index == len(storages):
            storages.append(StorageEntry(name, raw.data_ptr(), raw.nbytes(), raw.device))
            keep_alive.append(raw)
        tensors.append(TensorEntry(name, place.kind, index, tensor.dtype, region_of(tensor)))
    _check_disjoint(storages)
    return Destinations(tuple(storages), tuple(tensors), tuple(opaque), tuple(keep_alive))


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor: `container[key]`. `kind` is "parameter", "buffer" or "attribute"."""

    name: str
    kind: str
    container: Any
    key: Any
    tensor: torch.Tensor


def iterate_tensors(model: nn.Module) -> Iterator[Place]:
    """Yield every reachable tensor: parameters, buffers, attributes, and what containers hold."""
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield Place(dot + name, "parameter", module._parameters, name, parameter)
                yield from _attributes(f"{dot}{name}.", vars(parameter), frozenset())
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield Place(dot + name, "buffer", module._buffers, name, buffer)
        yield from _attributes(dot, vars(module), _MODULE_INTERNALS)


def first_difference(
    before: Destinations, after: Destinations, *, new_allowed: bool = False
) -> str | None:
    """Return a text about a tensor that was added, removed or moved between two collections.

    Args:
        before: an earlier collection of one model.
        after: a later collection.
        new_allowed: if True, an added tensor is no difference.

    Returns:
        The text, or None if the collections are equal.
    """
    old, new = _places(before), _places(after)
    for name in old if new_allowed else {**old, **new}:
        if name not in new or name not in old:
            return f"{name} is {'gone' if name in old else 'new'}"
        if new[name] != old[name]:
            return f"{name} was rebound: {old[name]} became {new[name]}"
    return None


def _places(destinations: Destinations) -> dict[str, tuple[object, ...]]:
    return {
        t.name: (
            hex(destinations.storages[t.storage].data_ptr),
            destinations.storages[t.storage].nbytes,
            t.region,
            t.dtype,
        )
        for t in destinations.tensors
    }


def _attributes(dot: str, owner: dict[str, Any], skipped: frozenset[str]) -> Iterator[Place]:
    for name, value in list(owner.items()):
        kind = type(value)  # most attributes of a module are plain values or its empty hooks
        if kind in _WITHOUT_TENSORS or (kind in _CONTAINERS and not value) or name in skipped:
            continue
        yield from _tensors_in(dot + name, owner, name, value, MAX_CONTAINER_DEPTH)


def _tensors_in(path: str, container: Any, key: Any, value: Any, depth: int) -> Iterator[Place]:
    if isinstance(value, torch.Tensor):
        yield Place(path, "attribute", container, key, value)
    elif depth and isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for inner, item in list(items):
            if type(item) not in _WITHOUT_TENSORS:
                yield from _tensors_in(f"{path}[{inner!r}]", value, inner, item, depth - 1)


def _check_disjoint(storages: list[StorageEntry]) -> None:
    ordered = sorted(storages, key=attrgetter("data_ptr"))
    for low, high in pairwise(ordered):
        if low.data_ptr + low.nbytes > high.data_ptr:
            raise ValueError(f"the storages of {low.name} and {high.name} overlap in memory")
