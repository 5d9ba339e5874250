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
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeAlias

from torch import nn

from sglang_loader.common.layout import BucketLayout, BucketTensor
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
        steps: in order.
    """

    number: str
    layout: BucketLayout
    tensors: Sequence[int]
    steps: Sequence[Step]


_Storages: TypeAlias = Mapping[int, int]
"""Storages of a traced layer, each with that of the layer that repeats it."""


class RepeatedLayers:
    """The layers of one model whose load was traced in this sync."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._is_off = not isinstance(model, nn.Module)
        self._groups: dict[tuple[str, str], _Group | None] = {}  # None: cannot be repeated
        self._alike: dict[tuple[str, str, str], bool] = {}
        self._of: tuple[Destinations, dict[str, int], dict[int, list[TensorEntry]]] | None = None

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
            places = [names[position] for position in tensors]
            numbers = {place.number if place else None for place in places}
            number = numbers.pop()
            group = None
            if number is not None and not numbers:
                group = _Group(number, traced.layout, tensors, steps)
                if not all(self._is_of_layer(ref, number, traced) for ref in _in_model(steps)):
                    group = None
            for place in places:
                if place is not None:
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

    def _is_of_layer(self, ref: TensorRef, number: str, traced: TracedBucket) -> bool:
        place = _Place.of(traced.destinations.storages[ref.index].name)
        return place is not None and place.number == number

    def _members(
        self, group: _Group, number: str, layout: BucketLayout, positions: Mapping[str, int]
    ) -> list[int] | None:
        """Return the positions of a group's tensors for another layer, or None if one differs."""
        members = []
        for position in group.tensors:
            known = group.layout.tensors[position]
            place = _Place.of(known.name)
            assert place is not None, "a group's tensors are numbered"
            at = positions.get(place.with_number(number))
            if at is None or _form(layout.tensors[at]) != _form(known):
                return None
            members.append(at)
        # A loader goes through the tensors in their order.
        return members if members == sorted(members) else None

    def _storages(self, group: _Group, number: str, destinations: Destinations) -> _Storages | None:
        """Return the storages of another layer, or None if the layers differ in their modules."""
        by_name, tensors = self._index(destinations)
        storages = {}
        for index in {ref.index for ref in _in_model(group.steps)}:
            known = destinations.storages[index]
            place = _Place.of(known.name)
            assert place is not None, "a group's storages are numbered"
            other = by_name.get(place.with_number(number))
            if other is None or not self._are_alike(place.kind[0], group.number, number):
                return None
            found = destinations.storages[other]
            is_same = (found.nbytes, found.device) == (known.nbytes, known.device)
            if not is_same or _forms(tensors[index]) != _forms(tensors[other]):
                return None
            storages[index] = other
        return storages

    def _index(
        self, destinations: Destinations
    ) -> tuple[dict[str, int], dict[int, list[TensorEntry]]]:
        """Return the storages by name, and the tensors in each."""
        if self._of is None or self._of[0] is not destinations:
            by_storage: defaultdict[int, list[TensorEntry]] = defaultdict(list)
            for tensor in destinations.tensors:
                by_storage[tensor.storage].append(tensor)
            names = {storage.name: at for at, storage in enumerate(destinations.storages)}
            self._of = destinations, names, by_storage
        return self._of[1:]

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


def _form(tensor: BucketTensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype


def _forms(tensors: Iterable[TensorEntry]) -> list[object]:
    """Return what is the same in layers of one kind of the tensors in a storage."""
    names = [(tensor, _Place.of(tensor.name)) for tensor in tensors]
    return [
        (place.kind if place else tensor.name, tensor.kind, tensor.dtype, tensor.region)
        for tensor, place in names
    ]


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
        if ref.space is Space.DESTINATION:
            return replace(ref, index=storages[ref.index])
        if ref.space is Space.BUCKET:
            delta = moved[group.layout.tensor_at(ref.region.offset)]
            return replace(ref, region=replace(ref.region, offset=ref.region.offset + delta))
        key = ref.space, ref.index
        if key not in renamed:
            renamed[key] = next(fresh)
        return replace(ref, index=renamed[key])

    for step in group.steps:
        reads, writes = tuple(map(placed, step.reads)), tuple(map(placed, step.writes))
        origins = traced.origins.follow(reads, writes)
        traced.steps.append(Step(step.op, step.traits, reads, writes, origins))
