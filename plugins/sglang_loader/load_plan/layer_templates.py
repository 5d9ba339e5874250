"""Plans of buckets without a trace: layers that load as a traced layer has loaded. Pure.

    templates = LayerTemplates()
    templates.add(traced, uses, bucket_plan)          # after the bucket's plan was checked
    inferred = templates.infer(layout, destinations)  # None: the bucket must be traced

Most layers of a model are of a few kinds, and `load_weights` loads all layers of a kind alike. A
trace takes a time for each tensor, and a large MoE has 400 tensors a layer. So the copies of a
traced layer's tensor serve as a template. For another layer, the layer's number is replaced in the
names of the tensor and of the storages that the copies write. The template fits if

- the tensor has the same shape and dtype, and
- the engine's two layers have the same parameters, in storages of the same sizes.

That a layer fits does not show that `load_weights` loads it alike. So an inferred plan is checked
bit for bit as a traced one is, and more (`verify.check_bucket`). What is saved is the trace, and
most of the work of the compiler.

No template is made of a tensor of which `load_weights` computes something, or that it loads into
bytes that other steps read or write. A model with such steps is traced as a whole if a later bucket
might depend on them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from sglang_loader.common.layout import BucketLayout, BucketTensor
from sglang_loader.common.regions.coalesce import coalesce, find_overlapping
from sglang_loader.common.regions.geometry import StridedCopy
from sglang_loader.load_plan.compiler import as_copy, effects_of
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.plan import NO_TENSORS, BucketPlan
from sglang_loader.load_plan.trace import Space, TracedBucket, in_space
from sglang_loader.load_plan.uses import BucketUses, TensorUse

MIN_TENSORS = 64
"""The fewest tensors of a bucket that is not traced. The check takes more memory without a trace:
a copy of what the bucket writes.
"""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_Layer = tuple[str, str]
"""A layer: the text of a name up to the layer's number, and the number."""


@dataclass(frozen=True, slots=True)
class _Name:
    """A name with the number of a layer: `model.layers.`, `3`, `.mlp.gate.weight`."""

    head: str
    number: str
    tail: str

    @classmethod
    def of(cls, name: str) -> _Name | None:
        """Split a name at its first number. Return None if it has none."""
        found = _NUMBER.search(name)
        return cls(name[: found.start()], found[0], name[found.end() :]) if found else None

    @property
    def kind(self) -> tuple[str, str]:
        """The name without the number."""
        return self.head, self.tail

    @property
    def layer(self) -> _Layer:
        """The name up to the number."""
        return self.head, self.number


@dataclass(frozen=True, slots=True)
class _Template:
    """The copies by which `load_weights` loads one tensor of any layer.

    Attributes:
        layer: the number of the traced layer.
        copies: by `_Name.kind` of the storage that they write. Sources count from the tensor's
            start, and `storage` is 0.
        use: the use of the tensor, or None if it was not read.
    """

    layer: str = field(compare=False)
    copies: tuple[tuple[tuple[str, str], StridedCopy], ...]
    use: TensorUse | None


@dataclass(frozen=True, slots=True)
class Inferred:
    """The plan of a bucket that was not traced, and the uses of its tensors."""

    plan: BucketPlan
    uses: BucketUses


_Key = tuple[tuple[str, str], tuple[int, ...], torch.dtype]


def _key_of(name: _Name, tensor: BucketTensor) -> _Key:
    return name.kind, tensor.shape, tensor.dtype


class LayerTemplates:
    """The templates of one model in one sync. See the module."""

    def __init__(self) -> None:
        self._is_off = False
        # None: the tensor of one layer was loaded otherwise than that of another.
        self._templates: dict[_Key, _Template | None] = {}
        self._layers: tuple[Destinations, _Layers] | None = None  # of the last destinations

    def add(self, traced: TracedBucket, uses: BucketUses, plan: BucketPlan) -> None:
        """Make templates of the tensors of a traced bucket.

        Args:
            uses: of the tensors of the bucket.
            plan: the checked plan of the bucket.
        """
        is_computed = plan.live_in or any(write.sources for write in plan.left_out)
        # What Python has read of the model may decide how any layer is loaded.
        if is_computed or plan.host_reads or traced.problems:
            self._is_off = True
        if self._is_off:
            return
        layout, storages = traced.layout, traced.destinations.storages
        copies: dict[int, list[StridedCopy]] = defaultdict(list)  # by the tensor's position
        others: set[int] = set()  # storages of steps that are no copies out of the bucket
        excluded = {tensor.name for tensor in plan.rest.tensors}
        for step in traced.steps:
            targets = in_space(step.writes, Space.DESTINATION)
            targets = [ref for ref in targets if 0 not in ref.region.shape]
            copy = as_copy(step) if targets else None
            if copy is not None:
                copies[layout.tensor_at(copy.src)].append(copy)
                continue
            read = step.origins if targets else ()  # what goes into temporaries alone is lost
            others |= {ref.index for ref in in_space((*read, *targets), Space.DESTINATION)}
            for ref in in_space((*read, *step.writes), Space.BUCKET):
                excluded.add(layout.tensors[layout.tensor_at(ref.region.offset)].name)
        for position, tensor in enumerate(layout.tensors):
            name = _Name.of(tensor.name)
            if name is None:
                continue
            own = copies[position]
            places = [_Name.of(storages[copy.storage].name) for copy in own]
            kinds = [place.kind for place in places if place and place.number == name.number]
            is_plain = tensor.name not in excluded and len(kinds) == len(own)
            template = None
            if is_plain and others.isdisjoint(copy.storage for copy in own):
                moved = [replace(copy, src=copy.src - tensor.offset, storage=0) for copy in own]
                pairs = tuple(zip(kinds, moved, strict=True))
                template = _Template(name.number, pairs, uses.tensors.get(tensor.name))
            key = _key_of(name, tensor)
            if self._templates.setdefault(key, template) != template:
                self._templates[key] = None

    def infer(self, layout: BucketLayout, destinations: Destinations) -> Inferred | None:
        """Return the plan of a bucket, or None if a tensor of it fits no template.

        Args:
            destinations: the storages of the model now.
        """
        if self._is_off or len(layout.tensors) < MIN_TENSORS:
            return None
        layers = self._layers_of(destinations)
        copies: list[StridedCopy] = []
        uses: dict[str, TensorUse] = {}
        loaded: set[str] = set()  # the numbers of layers that the bucket writes
        needed: set[str] = set()  # those of its tensors
        for tensor in layout.tensors:
            name = _Name.of(tensor.name)
            template = self._templates.get(_key_of(name, tensor)) if name is not None else None
            if name is None or template is None:
                return None
            needed.add(name.number)
            for (head, tail), copy in template.copies:
                storage = layers.storages.get(head + name.number + tail)
                pair = (head, template.layer), (head, name.number)
                if storage is None or not layers.are_alike(*pair):
                    return None
                copies.append(replace(copy, src=copy.src + tensor.offset, storage=storage))
                loaded.add(name.number)
            if template.use is not None:
                uses[tensor.name] = template.use
        # A layer of another pipeline stage has no copies at all, as no tensor of it is loaded.
        if loaded != needed or find_overlapping(copies):
            return None
        written, _ = effects_of(coalesced := coalesce(copies), ())
        plan = BucketPlan(
            layout=layout,
            copies=tuple(coalesced),
            rest=NO_TENSORS,
            written=written,
            live_in={},
            writes=written,
            left_out=(),
            recomputed=frozenset(),
            host_reads=(),
        )
        names = destinations.storages
        by_name = {names[storage].name: list(ranges) for storage, ranges in written.items()}
        return Inferred(plan, BucketUses(layout, uses, by_name))

    def _layers_of(self, destinations: Destinations) -> _Layers:
        if self._layers is None or self._layers[0] is not destinations:
            self._layers = destinations, _Layers(destinations)
        return self._layers[1]


class _Layers:
    """The parameters of each layer of the engine's model.

    Attributes:
        storages: the numbers of the storages by name.
    """

    def __init__(self, destinations: Destinations) -> None:
        self.storages = {entry.name: i for i, entry in enumerate(destinations.storages)}
        self._parameters: dict[_Layer, dict[str, object]] = defaultdict(dict)
        for tensor in destinations.tensors:
            name = _Name.of(tensor.name)
            # Tables that layers share are reached by the first layer alone.
            if name is None or tensor.kind != "parameter":
                continue
            storage = destinations.storages[tensor.storage]
            place = _Name.of(storage.name)
            is_own = place is not None and place.layer == name.layer
            self._parameters[name.layer][name.tail] = (
                *(tensor.dtype, tensor.region, storage.nbytes, storage.device),
                place.kind if place is not None and is_own else storage.name,
            )
        self._are_alike: dict[tuple[_Layer, _Layer], bool] = {}

    def are_alike(self, first: _Layer, second: _Layer) -> bool:
        """Return True if two layers have the same parameters."""
        pair = first, second
        if pair not in self._are_alike:
            parameters = self._parameters.get(first)
            self._are_alike[pair] = bool(parameters) and parameters == self._parameters.get(second)
        return self._are_alike[pair]
