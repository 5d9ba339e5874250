"""Traces of layers that repeat a layer whose load was traced. Pure: reads traces, runs nothing.

    layers = RepeatedLayers(model)
    layers.learn(traced)                             # a real trace of a bucket
    traced = layers.trace(layout, destinations)      # of a later bucket. None: trace it really

Models consist of layers that are numbered, and one layer's `load_weights` does what another's does.
So one layer of each kind is traced, and the others get its steps with their own places:

    traced    layers.0.q_proj at byte 512   -> layers.0.qkv_proj, from byte 0
    repeated  layers.7.q_proj at byte 8,704 -> layers.7.qkv_proj, from byte 0

A layer is of the same kind if its modules, their tensors in memory and the tensors in the bucket
are the same but for the number. What such a trace leads to is proven as of any trace: `verify`
compares what its plan loads with what `load_weights` loads. If the model does anything that cannot
be told apart by layers, nothing is repeated.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

from torch import nn

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.geometry import Region
from sglang_loader.load_plan.destinations import Destinations, TensorEntry
from sglang_loader.load_plan.trace import Space, Step, TensorRef, TracedBucket, in_space

_NUMBERED = re.compile(r"(?P<before>.*?\.)(?P<number>\d+)(?P<after>\..*)")


@dataclass(frozen=True)
class _Place:
    """A dotted name, divided at its first number.

    Attributes:
        kind: the name without the number.
    """

    kind: tuple[str, str]
    number: str

    @classmethod
    def of(cls, name: str) -> _Place | None:
        """Divide a name. Return None if it has no number."""
        found = _NUMBERED.fullmatch(name)
        return cls((found["before"], found["after"]), found["number"]) if found else None

    def with_number(self, number: str) -> str:
        before, after = self.kind
        return f"{before}{number}{after}"


@dataclass(frozen=True, eq=False)
class _Group:
    """Tensors of one layer that are loaded together, and the steps of their load.

    Attributes:
        layout: of the bucket that was traced.
        tensors: positions in `layout`, ascending.
        places: the divided names of the tensors.
        steps: in order.
        storages: that the steps read or write, by number.
    """

    number: str
    layout: BucketLayout
    tensors: Sequence[int]
    places: Sequence[_Place]
    steps: Sequence[Step]
    storages: frozenset[int]


_Storages: TypeAlias = Mapping[int, int]
"""Storages of a traced layer, each with that of the layer that repeats it."""


class _Index:
    """The storages of a model by name, and what is in them.

    Attributes:
        numbers: of the storages, by name.
        repeats: for a storage of a traced layer and a layer's number, the other layer's storage,
            or None if it is unlike. As far as it is known.
    """

    def __init__(self, destinations: Destinations) -> None:
        self.destinations = destinations
        self.numbers = {storage.name: at for at, storage in enumerate(destinations.storages)}
        self.repeats: dict[tuple[int, str], int | None] = {}
        self._tensors: defaultdict[int, list[TensorEntry]] = defaultdict(list)
        for tensor in destinations.tensors:
            self._tensors[tensor.storage].append(tensor)

    def are_alike(self, first: int, second: int) -> bool:
        """Return True if two storages have the same tensors, but for their layers' numbers."""
        known, other = (self.destinations.storages[at] for at in (first, second))
        if (known.nbytes, known.device) != (other.nbytes, other.device):
            return False
        return self._forms(first) == self._forms(second)

    def _forms(self, storage: int) -> list[object]:
        named = [(tensor, _Place.of(tensor.name)) for tensor in self._tensors[storage]]
        return [
            (place.kind if place else tensor.name, tensor.kind, tensor.dtype, tensor.region)
            for tensor, place in named
        ]


class RepeatedLayers:
    """The layers of one model whose load was traced in this sync."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._is_off = not isinstance(model, nn.Module)
        self._groups: dict[tuple[str, str], _Group | None] = {}  # None: cannot be repeated
        self._alike: dict[tuple[str, str, str], bool] = {}
        self._index: _Index | None = None

    def give_up(self) -> None:
        """Repeat nothing any more in this sync."""
        self._is_off = True

    def learn(self, traced: TracedBucket) -> None:
        """Record the layers of a bucket that was really traced."""
        if self._is_off:
            return
        # A decision by data may be another one in another layer.
        if traced.problems or traced.host_reads or not self._are_apart(traced):
            self._is_off = True
            return
        names = [_Place.of(tensor.name) for tensor in traced.layout.tensors]
        for tensors, steps in _loaded_together(traced):
            places = [place for at in tensors if (place := names[at]) is not None]
            numbers = {place.number for place in places}
            group = None
            if len(places) == len(tensors) and len(numbers) == 1:
                [number] = numbers
                storages = frozenset(ref.index for ref in _in_model(steps))
                if all(self._is_of_layer(storage, number, traced) for storage in storages):
                    group = _Group(number, traced.layout, tensors, places, steps, storages)
            for place in places:
                self._groups.setdefault(place.kind, group)

    def trace(self, layout: BucketLayout, destinations: Destinations) -> TracedBucket | None:
        """Return the trace of a bucket all of whose tensors are of known layers, else None."""
        if self._is_off:
            return None
        traced, numbers = TracedBucket(layout, destinations), count()
        positions = {tensor.name: at for at, tensor in enumerate(layout.tensors)}
        ends: defaultdict[int, list[tuple[_Group, str, list[int]]]] = defaultdict(list)
        seen: set[tuple[_Group, str]] = set()
        for tensor in layout.tensors:
            place = _Place.of(tensor.name)
            group = self._groups.get(place.kind) if place is not None else None
            if group is None or place is None:
                return None
            if (group, place.number) in seen:
                continue
            seen.add((group, place.number))
            members = self._members(group, place.number, layout, positions)
            if members is None:
                return None
            ends[max(members)].append((group, place.number, members))
        # A group's steps stand where its last tensor does: a loader needs all of them.
        for _, groups in sorted(ends.items()):
            for group, number, members in groups:
                storages = self._storages(group, number, destinations)
                if storages is None:
                    return None
                _repeat(group, members, storages, traced, numbers)
        return traced

    def _are_apart(self, traced: TracedBucket) -> bool:
        """Return False if a step of no tensor concerns a layer, or comes in each bucket."""
        has_others = any(_Place.of(tensor.name) is None for tensor in traced.layout.tensors)
        for step in traced.steps:
            if in_space((*step.origins, *step.writes), Space.BUCKET):
                continue
            refs = in_space((*step.reads, *step.writes, *step.origins), Space.DESTINATION)
            names = [traced.destinations.storages[ref.index].name for ref in refs]
            # Zeros in a padded row of an embedding are written with the embedding alone.
            if names and (not has_others or any(map(_Place.of, names))):
                return False
            if in_space(step.writes, Space.CONSTANT):
                return False
        return True

    def _is_of_layer(self, storage: int, number: str, traced: TracedBucket) -> bool:
        place = _Place.of(traced.destinations.storages[storage].name)
        return place is not None and place.number == number

    def _members(
        self, group: _Group, number: str, layout: BucketLayout, positions: Mapping[str, int]
    ) -> list[int] | None:
        """Return the positions of a group's tensors for another layer, or None if one differs."""
        members = []
        for position, place in zip(group.tensors, group.places, strict=True):
            known = group.layout.tensors[position]
            at = positions.get(place.with_number(number))
            if at is None:
                return None
            own = layout.tensors[at]
            if (own.shape, own.dtype) != (known.shape, known.dtype):
                return None
            members.append(at)
        # A loader goes through the tensors in their order.
        return members if members == sorted(members) else None

    def _storages(self, group: _Group, number: str, destinations: Destinations) -> _Storages | None:
        """Return the storages of another layer, or None if the layers differ in their modules."""
        if self._index is None or self._index.destinations is not destinations:
            self._index = _Index(destinations)
        repeats, storages = self._index.repeats, {}
        for storage in group.storages:
            if (storage, number) not in repeats:
                repeats[storage, number] = self._repeat_of(storage, number, self._index)
            other = repeats[storage, number]
            if other is None:
                return None
            storages[storage] = other
        return storages

    def _repeat_of(self, storage: int, number: str, index: _Index) -> int | None:
        """Return another layer's storage that is like one of a traced layer, or None."""
        place = _Place.of(index.destinations.storages[storage].name)
        assert place is not None, "a group's storages are numbered"
        other = index.numbers.get(place.with_number(number))
        is_like = other is not None and index.are_alike(storage, other)
        return other if is_like and self._are_alike(place.kind[0], place.number, number) else None

    def _are_alike(self, before: str, known: str, number: str) -> bool:
        """Return True if the modules of two layers have the same classes and loading functions."""
        key = before, known, number
        if key not in self._alike:
            first, second = (self._modules_of(f"{before}{each}") for each in (known, number))
            self._alike[key] = first is not None and first == second
        return self._alike[key]

    def _modules_of(self, path: str) -> list[object] | None:
        try:
            layer = self._model.get_submodule(path)
        except AttributeError:  # a list of tensors, for example
            return None
        return [
            (name, type(module), [_loader_of(each) for each in module.parameters(recurse=False)])
            for name, module in layer.named_modules()
        ]


def _loader_of(parameter: nn.Parameter) -> tuple[object, object]:
    """Return the class and the loading function of a parameter, without what it is bound to."""
    loader = getattr(parameter, "weight_loader", None)
    function = getattr(loader, "__func__", loader)
    return type(parameter), getattr(function, "__code__", type(function))


def _in_model(steps: Iterable[Step]) -> Iterable[TensorRef]:
    for step in steps:
        yield from in_space((*step.reads, *step.writes, *step.origins), Space.DESTINATION)


def _loaded_together(traced: TracedBucket) -> list[tuple[list[int], list[Step]]]:
    """Divide a bucket's tensors into groups that share no step. Return the steps of each group."""
    # A set for each tensor and each temporary. Those that a step uses together become one.
    layout, joined = traced.layout, dict[object, object]()

    def set_of(member: object) -> object:
        while (other := joined.get(member, member)) != member:
            member = other
        return member

    used = [list(_used_by(step, layout)) for step in traced.steps]
    for members in used:
        for member in members[1:]:
            joined[set_of(member)] = set_of(members[0])
    steps: defaultdict[object, list[Step]] = defaultdict(list)
    for members, step in zip(used, traced.steps, strict=True):
        if members:
            steps[set_of(members[0])].append(step)
    tensors: defaultdict[object, list[int]] = defaultdict(list)
    for position in range(len(layout.tensors)):
        tensors[set_of(position)].append(position)
    return [(positions, steps[name]) for name, positions in tensors.items()]


def _used_by(step: Step, layout: BucketLayout) -> Iterable[object]:
    """Yield the positions of the tensors that a step uses, and the temporaries."""
    refs = (*step.reads, *step.writes, *step.origins)
    for ref in in_space(refs, Space.BUCKET):
        yield layout.tensor_at(ref.region.offset)
    for ref in in_space(refs, Space.TEMPORARY):
        yield ref.space, ref.index


def _repeat(
    group: _Group,
    members: Sequence[int],
    storages: _Storages,
    traced: TracedBucket,
    numbers: Iterable[int],
) -> None:
    """Add a group's steps to a trace, with the places of another layer.

    Args:
        members: the positions of the layer's tensors, in the order of `group.tensors`.
        numbers: new numbers for temporaries and constants.
    """
    moved = {
        known: traced.layout.tensors[own].offset - group.layout.tensors[known].offset
        for known, own in zip(group.tensors, members, strict=True)
    }
    renamed: dict[tuple[Space, int], int] = {}
    fresh = iter(numbers)

    def placed(ref: TensorRef) -> TensorRef:
        index, region = ref.index, ref.region
        if ref.space is Space.DESTINATION:
            index = storages[index]
        elif ref.space is Space.BUCKET:
            offset = region.offset + moved[group.layout.tensor_at(region.offset)]
            region = Region(offset, region.shape, region.stride, region.itemsize)
        else:
            key = ref.space, index
            if key not in renamed:
                renamed[key] = next(fresh)
            index = renamed[key]
        return TensorRef(ref.space, index, ref.dtype, region)

    for step in group.steps:
        reads, writes = tuple(map(placed, step.reads)), tuple(map(placed, step.writes))
        origins = traced.origins.follow(reads, writes)
        traced.steps.append(Step(step.op, step.traits, reads, writes, origins))
