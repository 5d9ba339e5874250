"""Traces an export that converts parameter by parameter, as Megatron-Bridge does.

    name = "0.decoder.layers.0.mlp.linear_fc1.weight"
    conversion = Conversion((name,), kind, (parameter,), convert)
    traced = trace_conversions([conversion, ...], rank=0, world_size=8, device=device)

`convert` gathers a parameter from other ranks and makes exported tensors from it. The trace runs
`convert` on codes instead of the parameter: each code encodes a rank and an element. Every element
of the output is then a code, and names the rank and the element that it comes from.

Some parameters are exported together: the experts of a layer, as one tensor. Their codes encode the
parameter, too. The tensor is cut where the parameter changes, and each part has an origin.

No rank waits for another, because collectives are simulated: where `convert` gathers the shard of
another rank, it gets this rank's codes with the number of the other rank.

To detect arithmetic, `convert` is run again on scrambled codes, and must return the same elements,
scrambled. The second run is skipped if a parameter of the same kind gave the same codes before: the
device compares digests of the codes, and the host waits for all comparisons together, at the end.

The ranks' traces are merged (`source_map.merge_traces`), and the real export is compared with them,
bit for bit (`comparison.Comparison`). So nothing depends on assumptions about the layout of ranks.

`trace_by_examples` is what a sync uses: it takes less time, while the export is made. It runs one
conversion of each kind on codes, and all whose parameters have bytes that a comparison could not
tell apart, say the values 1.0 of a norm. The other conversions of a kind are expected to make the
same of their parameters. `trace_conversions` is for when the comparison finds otherwise.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise, zip_longest
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, ProcessGroup

from sglang_loader.common.digest import digests
from sglang_loader.common.regions.compose import ByteMap
from sglang_loader.common.regions.geometry import Region
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sources.export_trace import (
    NotTraceable,
    TracedExport,
    TracedParameter,
    TracedTensor,
    TracingMode,
)
from verl_sglang_sync.sources.owners import Origin, Owners

FACTOR, MASK = 0x2545F4914F6CDD1D, 0x1B873593CC9E2D51
"""Numbers that scramble codes, modulo the integers' range. An odd factor has an inverse."""

NamedShape: TypeAlias = tuple[str, tuple[int, ...]]

CHUNK = 1 << 24
"""Number of elements that one step processes. Bounds the memory needed beside the codes."""

LARGE_BYTES = 64 << 20
"""Codes of more bytes are given back to the device, though that takes the device's time."""

SMALL = 1 << 16
"""Largest number of codes that are decoded on the host. To decode asks about ten questions of them,
and the answer to each waits for a device that works for the engine, too.
"""

NUM_SAMPLES = 64
"""Number of a parameter's elements that are looked at to find out if all are equal."""

_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class Conversion:
    """The conversion of one parameter, or of some that are exported together.

    Attributes:
        sources: names of the parameters among the sources, the same on all ranks that hold a part.
        kind: a value that is equal for parameters that the same code converts, as in all layers.
        parameters: the parameters, all of one shape and dtype.
        convert: makes the exported `(name, tensor)` pairs from tensors in the parameters' places.
    """

    sources: tuple[str, ...]
    kind: object
    parameters: tuple[torch.Tensor, ...]
    convert: Callable[..., Iterable[NamedTensor]]

    @property
    def text(self) -> str:
        """Name the parameters, for a message."""
        num_others = len(self.sources) - 1
        return self.sources[0] + (f" (and {num_others} others)" if num_others else "")


@dataclass(frozen=True)
class _Part:
    """A part of an exported tensor: bytes of one parameter of the conversion, by its number."""

    parameter: int
    owners: Owners
    bytes: ByteMap


def trace_conversions(
    conversions: Iterable[Conversion], *, rank: int, world_size: int, device: torch.device
) -> TracedExport:
    """Trace the part of the export that is made from this rank's parameters.

    Args:
        device: the engine's device, on which all parameters must be.

    Raises:
        NotTraceable: a tensor is computed, or is not a strided set of the shards' bytes.
    """
    conversions = list(conversions)
    # By kind, the digests of the codes that a conversion gave, and the parts found for its tensors.
    examples: dict[object, tuple[torch.Tensor, list[list[_Part]]]] = {}
    found: list[tuple[list[NamedShape], list[list[_Part]]]] = []
    comparisons: list[tuple[int, torch.Tensor]] = []  # a conversion's number, a bool on the device
    with torch.no_grad():
        for number, conversion in enumerate(conversions):
            _check(conversion, device)
            codes = _Codes.of(conversion, rank, world_size)
            plain = _converted(conversion, codes, is_scrambled=False)
            kind, digests_of_codes = _kind_and_shapes(conversion, plain), _digests(plain)
            # Most layers and experts give the same codes as an example. Skip the second run there.
            if kind in examples:
                differs = examples[kind][0] != digests_of_codes
                comparisons.append((number, differs.any().to(device)))
            else:
                examples[kind] = digests_of_codes, _parts(conversion, codes, plain)
            found.append((_shapes_of(plain), examples[kind][1]))
            del plain  # frees the memory for the next conversion
        for number in _differing(comparisons):
            found[number] = _run_on_codes(conversions[number], rank, world_size)
    _free_codes(device)
    return _traced_export(conversions, found)


def _run_on_codes(
    conversion: Conversion, rank: int, world_size: int
) -> tuple[list[NamedShape], list[list[_Part]]]:
    """Return the tensors that a conversion makes, and the parts of each."""
    codes = _Codes.of(conversion, rank, world_size)
    plain = _converted(conversion, codes, is_scrambled=False)
    found = _shapes_of(plain), _parts(conversion, codes, plain)
    is_large, device = codes.own.nbytes > LARGE_BYTES, codes.own.device
    del codes, plain
    if is_large:
        _free_codes(device)
    return found


def _free_codes(device: torch.device) -> None:
    # The codes of an embedding take gigabytes. A colocated engine loads the first bucket now.
    if device.type == "cuda":
        torch.cuda.empty_cache()


class MadeBy(NamedTuple):
    """The conversion that made an exported tensor.

    Attributes:
        source: one of the conversion's sources. Of another pipeline stage's conversion, "".
        number: of the tensor, among those that the conversion made.
        first: name of the first of these.
        is_repeated: another tensor of this name was exported later.
    """

    source: str
    number: int
    first: str
    is_repeated: bool = False


def trace_by_examples(
    conversions: Iterable[Conversion],
    made: Mapping[str, MadeBy],
    *,
    rank: int,
    world_size: int,
    device: torch.device,
) -> TracedExport:
    """Trace an export by examples, see the top of this module.

    So the caller must compare all tensors with the parameters that the trace names. The export may
    still run: the trace grows with `made`. A conversion is run on codes when its tensors are looked
    up, which the export has made by then.

    Args:
        made: for each exported tensor, by name, what made it.

    Raises:
        NotTraceable: when a tensor is looked up, as `trace_conversions`, or if the tensor is named,
            or made, otherwise than that of the example.
    """
    tensors = _TensorsMade(conversions, made, rank, world_size, device)
    return TracedExport(tensors.numbering.parameters, tensors, others=_Others(made))


class _Numbering:
    """Parameters in the order in which their numbers were first asked for."""

    def __init__(self) -> None:
        self.parameters: list[TracedParameter] = []
        self._numbers: dict[TracedParameter, int] = {}

    def number_of(self, parameter: TracedParameter) -> int:
        """Return the parameter's place in `parameters`. A new one is added."""
        number = self._numbers.setdefault(parameter, len(self.parameters))
        if number == len(self.parameters):
            self.parameters.append(parameter)
        return number


class _Expected(NamedTuple):
    """A tensor that a conversion is expected to make.

    Attributes:
        relative_name: see `_relative_name`.
    """

    relative_name: object
    tensor: TracedTensor


class _TensorsMade(Mapping[str, TracedTensor]):
    """The traced tensors of an export, as many as it has made.

    Attributes:
        numbering: of the parameters of the tensors that were looked up.
    """

    def __init__(
        self,
        conversions: Iterable[Conversion],
        made: Mapping[str, MadeBy],
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        self.numbering = _Numbering()
        conversions = list(conversions)
        self._conversions = {source: each for each in conversions for source in each.sources}
        self._indistinct = _indistinct(conversions)
        self._made = made
        self._ranks = rank, world_size
        self._device = device
        self._examples: dict[object, tuple[list[NamedShape], list[list[_Part]]]] = {}
        self._expected: dict[str, list[_Expected]] = {}  # by the first source of a conversion
        self._found: dict[str, TracedTensor] = {}  # each name is matched with its example once

    def __getitem__(self, name: str) -> TracedTensor:
        source, number, first, is_repeated = self._made[name]
        if not source:
            raise KeyError(name)
        if is_repeated:
            raise NotTraceable(f"{name} is made of two parameters")
        if (found := self._found.get(name)) is not None:
            return found
        expected = self._expected_of(self._conversions[source])
        relative = _relative_name(name, first)
        if number >= len(expected) or expected[number].relative_name != relative:
            raise NotTraceable(f"{source} becomes {name}, which others of its kind do not")
        self._found[name] = expected[number].tensor
        return expected[number].tensor

    def _expected_of(self, conversion: Conversion) -> list[_Expected]:
        expected = self._expected.get(conversion.sources[0])
        if expected is None:
            _check(conversion, self._device)
            shapes, all_parts = self._example_of(conversion)
            expected = [
                _Expected(
                    _relative_name(name, shapes[0][0]),
                    _traced_tensor(conversion, shape, parts, self.numbering),
                )
                for (name, shape), parts in zip(shapes, all_parts, strict=True)
            ]
            self._expected[conversion.sources[0]] = expected
        return expected

    def _example_of(self, conversion: Conversion) -> tuple[list[NamedShape], list[list[_Part]]]:
        is_apart = conversion.sources[0] in self._indistinct
        kind = conversion.sources if is_apart else _kind_of(conversion)
        if kind not in self._examples:
            with torch.no_grad():
                self._examples[kind] = _run_on_codes(conversion, *self._ranks)
        return self._examples[kind]

    def __iter__(self) -> Iterator[str]:
        return (name for name, made in self._made.items() if made.source)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Others:
    """The names of an export's tensors that other pipeline stages have made."""

    def __init__(self, made: Mapping[str, MadeBy]) -> None:
        self._made = made

    def __contains__(self, name: object) -> bool:
        return name in self._made and not self._made[str(name)].source


def _relative_name(name: str, first: str) -> object:
    """Return what is equal for the same tensor of two conversions of a kind.

    That is the name without its numbers, and how far these are from those of the first tensor.
    """
    numbers, first_numbers = _NUMBERS.findall(name), _NUMBERS.findall(first)
    distances = (int(n) - int(m) for n, m in zip_longest(numbers, first_numbers, fillvalue=0))
    return _NUMBERS.sub("#", name), tuple(distances)


def _indistinct(conversions: Sequence[Conversion]) -> set[str]:
    """Return the first sources of conversions with vectors, or parameters that may be constant.

    Such bytes may stay the same if a conversion moves them.
    """
    found: set[str] = set()
    samples: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    sampled: defaultdict[torch.dtype, list[str]] = defaultdict(list)
    for conversion in conversions:
        for parameter in conversion.parameters:
            step = parameter.numel() // NUM_SAMPLES
            if parameter.dim() < 2 or not step or not parameter.is_contiguous():
                found.add(conversion.sources[0])
                continue
            sample = parameter.detach().as_strided((NUM_SAMPLES,), (step,))
            samples[parameter.dtype].append(sample)
            sampled[parameter.dtype].append(conversion.sources[0])
    for dtype, sources in sampled.items():
        rows = torch.stack(samples[dtype])
        are_equal = (rows == rows[:, :1]).all(dim=1).tolist()
        found.update(compress(sources, are_equal))
    return found


def _kind_of(conversion: Conversion) -> object:
    """Return a value that is equal for conversions that the same code makes of the same shapes."""
    first = conversion.parameters[0]
    together = tuple(_relative_name(name, conversion.sources[0]) for name in conversion.sources)
    return conversion.kind, together, first.shape, first.dtype


def _kind_and_shapes(conversion: Conversion, converted: Sequence[NamedTensor]) -> object:
    """Return a value that is equal for conversions that may give the same codes."""
    shapes = tuple((tensor.shape, tensor.dtype) for _, tensor in converted)
    return _kind_of(conversion), shapes


def _shapes_of(converted: Sequence[NamedTensor]) -> list[NamedShape]:
    return [(name, tuple(tensor.shape)) for name, tensor in converted]


def _digests(converted: Sequence[NamedTensor]) -> torch.Tensor:
    """Return the digests of a conversion's tensors: int64 `[n, 2]`. Asynchronous."""
    tensors = [tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in converted]
    return digests(tensors) if tensors else torch.empty(0, 2, dtype=torch.int64)


def _differing(comparisons: Sequence[tuple[int, torch.Tensor]]) -> list[int]:
    """Wait for the device, and return the numbers of the conversions that differ."""
    if not comparisons:
        return []
    differ = torch.stack([differs for _, differs in comparisons]).tolist()
    return [number for (number, _), differs in zip(comparisons, differ, strict=True) if differs]


def _traced_export(
    conversions: Sequence[Conversion],
    found: Sequence[tuple[list[NamedShape], list[list[_Part]]]],
) -> TracedExport:
    """Return the trace of all conversions, in their order.

    Args:
        found: for each conversion its tensors, and the parts of each tensor.
    """
    numbering = _Numbering()
    tensors: dict[str, TracedTensor] = {}
    for conversion, (converted, all_parts) in zip(conversions, found, strict=True):
        for (name, shape), parts in zip(converted, all_parts, strict=True):
            if name in tensors:
                raise NotTraceable(f"{name} is made of two parameters")
            tensors[name] = _traced_tensor(conversion, shape, parts, numbering)
    return TracedExport(tuple(numbering.parameters), tensors)


def _traced_tensor(
    conversion: Conversion,
    shape: tuple[int, ...],
    parts: Sequence[_Part],
    numbering: _Numbering,
) -> TracedTensor:
    """Make a tensor's trace."""
    origins = []
    for part in parts:
        parameter = TracedParameter(conversion.sources[part.parameter], part.owners)
        origins.append(Origin(numbering.number_of(parameter), part.bytes))
    return TracedTensor(conversion.parameters[0].dtype, shape, tuple(origins))


def _check(conversion: Conversion, device: torch.device) -> None:
    """Raise NotTraceable unless the parameters are alike, and where the engine can read them."""
    first = conversion.parameters[0]
    for source, parameter in zip(conversion.sources, conversion.parameters, strict=True):
        if parameter.device.type != device.type or not parameter.is_contiguous():
            raise NotTraceable(
                f"{source} is on {parameter.device} with strides {parameter.stride()}, "
                f"the engine on {device}"
            )
        if (parameter.shape, parameter.dtype) != (first.shape, first.dtype):
            raise NotTraceable(
                f"{source} is exported together with {conversion.sources[0]}, which has another "
                "shape or dtype"
            )


def _parts(
    conversion: Conversion, codes: _Codes, plain: Sequence[NamedTensor]
) -> list[list[_Part]]:
    """Convert scrambled codes, too, and return the parts of each converted tensor."""
    scrambled = _converted(conversion, codes, is_scrambled=True)
    if [name for name, _ in plain] != [name for name, _ in scrambled]:
        raise NotTraceable(f"what {conversion.text} becomes depends on its values")
    parts = []
    for (name, tensor), (_, scrambled_tensor) in zip(plain, scrambled, strict=True):
        try:
            parts.append(codes.decode(tensor, scrambled_tensor))
        except NotTraceable as error:
            raise NotTraceable(f"{name} {error}") from None
    return parts


def _converted(conversion: Conversion, codes: _Codes, *, is_scrambled: bool) -> list[NamedTensor]:
    """Run a conversion on codes."""
    # A conversion may write to its inputs.
    inputs = codes.scramble(codes.own) if is_scrambled else codes.own.clone()
    shape = conversion.parameters[0].shape
    try:
        with _SimulatedCollectives(codes, is_scrambled=is_scrambled).tracing("the conversion"):
            return list(conversion.convert(*(each.view(shape) for each in inputs)))
    except NotTraceable as error:
        raise NotTraceable(f"{conversion.text}: {error}") from error


class _Codes:
    """Integers that encode the elements of the shards of some parameters.

    A code is `(rank * number of parameters + parameter) * numel + element`.

    Args:
        parameter: one of the parameters, which are alike.
        num_parameters: the number of parameters that are converted together.

    Attributes:
        own: the codes of this rank's shards, a row for each parameter.
    """

    def __init__(
        self, parameter: torch.Tensor, num_parameters: int, rank: int, world_size: int
    ) -> None:
        self._numel, self._itemsize = parameter.numel(), parameter.element_size()
        self._num_parameters, self._world_size = num_parameters, world_size
        self._numel_of_rank = num_parameters * self._numel
        self.rank = rank
        is_small = self._numel_of_rank * world_size < 1 << 31  # 32 bits halve the memory
        self.dtype, self._bits = (torch.int32, 32) if is_small else (torch.int64, 64)
        start = rank * self._numel_of_rank
        self.own = torch.arange(
            start, start + self._numel_of_rank, dtype=self.dtype, device=parameter.device
        ).view(num_parameters, self._numel)

    @classmethod
    def of(cls, conversion: Conversion, rank: int, world_size: int) -> _Codes:
        """Make the codes of a conversion's parameters."""
        parameters = conversion.parameters
        return cls(parameters[0], len(parameters), rank, world_size)

    def scramble(self, codes: torch.Tensor) -> torch.Tensor:
        # A copy of scrambled codes is the scrambled copy. Arithmetic gives another result.
        return (codes * self._wrapped(FACTOR)) ^ self._wrapped(MASK)

    def unscramble(self, codes: torch.Tensor) -> torch.Tensor:
        inverse = pow(FACTOR, -1, 1 << self._bits)
        return (codes ^ self._wrapped(MASK)) * self._wrapped(inverse)

    def of_rank(self, codes: torch.Tensor, rank: int, *, is_scrambled: bool) -> torch.Tensor:
        """Return codes of this rank's shard as those of another rank's."""
        plain = self.unscramble(codes) if is_scrambled else codes
        moved = plain + (rank - self.rank) * self._numel_of_rank
        return self.scramble(moved) if is_scrambled else moved

    def decode(self, tensor: torch.Tensor, scrambled: torch.Tensor) -> list[_Part]:
        """Find the owners and bytes of a converted tensor, part by part.

        Args:
            tensor: the result of the plain codes.
            scrambled: the result of the scrambled codes.

        Raises:
            NotTraceable: the tensor is computed, or no strided set of elements. The message begins
                with the verb, and the caller puts the tensor's name before it.
        """
        if tensor.dtype != self.dtype or scrambled.dtype != self.dtype:
            raise NotTraceable(f"is converted to another dtype, or computed: {tensor.dtype}")
        if tensor.shape != scrambled.shape:
            raise NotTraceable("has a shape that depends on values")
        flat, scrambled = tensor.reshape(-1), scrambled.reshape(-1)
        if flat.numel() <= SMALL:
            flat, scrambled = flat.cpu(), scrambled.cpu()
        for chunk in _chunks(flat.numel()):
            codes = flat[chunk]
            if not torch.equal(self.unscramble(scrambled[chunk]), codes):
                raise NotTraceable("is computed")
            ranks = codes // max(self._numel_of_rank, 1)
            if int(ranks.min()) < 0 or int(ranks.max()) >= self._world_size:
                raise NotTraceable("is computed, or comes from a rank that is not there")
        bounds = [0, *self._changes_of_parameter(flat), flat.numel()]
        return [self._part(flat[start:stop]) for start, stop in pairwise(bounds)]

    def _changes_of_parameter(self, codes: torch.Tensor) -> list[int]:
        """Return the places before which another parameter begins.

        Raises:
            NotTraceable: the parameters alternate more often than ranks and parameters allow.
        """
        places: list[int] = []
        if self._num_parameters == 1:
            return places
        for chunk in _chunks(codes.numel() - 1):
            neighbours = codes[chunk.start : chunk.stop + 1] // self._numel % self._num_parameters
            changes = (neighbours[1:] != neighbours[:-1]).nonzero().flatten() + chunk.start + 1
            if len(places) + len(changes) >= self._num_parameters * self._world_size:
                raise NotTraceable("has the bytes of several parameters in turns")
            places += changes.tolist()
        return places

    def _part(self, codes: torch.Tensor) -> _Part:
        """Find the owners and bytes of some codes, all of one parameter."""
        places = codes.clone()
        has_part = torch.zeros(self._world_size, dtype=torch.bool, device=codes.device)
        for chunk in _chunks(places.numel()):
            has_part[places[chunk] // self._numel_of_rank] = True
        # The parameter is the concatenation of the shards of the ranks that have a part.
        ranks = has_part.nonzero().flatten()
        shard_of_rank = torch.cumsum(has_part, 0, dtype=self.dtype) - 1
        for chunk in _chunks(places.numel()):
            # From codes to elements of the parameter.
            shards = shard_of_rank[places[chunk] // self._numel_of_rank]
            places[chunk] = shards * self._numel + places[chunk] % self._numel
        nbytes = self._numel * self._itemsize
        starts = tuple(i * nbytes for i in range(len(ranks)))
        owners = Owners(starts, tuple((rank,) for rank in ranks.tolist()), len(ranks) * nbytes)
        parameter = int(codes[0]) // self._numel % self._num_parameters if codes.numel() else 0
        return _Part(parameter, owners, ByteMap.of(_strided(places, self._itemsize)))

    def _wrapped(self, number: int) -> int:
        """Return a number modulo the integers' range, as a signed integer."""
        number &= (1 << self._bits) - 1
        return number - (1 << self._bits if number >> (self._bits - 1) else 0)


class _SimulatedCollectives(TracingMode):
    """A dispatch mode that computes the results of collectives of codes, without communication."""

    def __init__(self, codes: _Codes, *, is_scrambled: bool) -> None:
        super().__init__()
        self._codes = codes
        self._is_scrambled = is_scrambled

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        name = func._schema.name
        # Every transfer is (output, input, rank): `output` receives what `rank` would send, which
        # is this rank's `input` with the codes of `rank`.
        if name == "c10d::allgather_":
            ((outputs,), (input_,), _), ranks = args[:3], self._ranks(args[2])
            pairs = zip(outputs, ranks, strict=True)
            transfers = [(output, input_, rank) for output, rank in pairs]
        elif name == "c10d::broadcast_":
            ((output,), _, root), ranks = args[:3], self._ranks(args[1])
            transfers = [(output, output, ranks[root])]
        else:
            self._refuse(f"the export communicates by {func}")
        for output, input_, rank in transfers:
            if {output.dtype, input_.dtype} != {self._codes.dtype}:
                self._refuse(f"the export communicates {input_.dtype}: {func}")
            output.copy_(self._codes.of_rank(input_, rank, is_scrambled=self._is_scrambled))
        return args[0], FakeWork().boxed()

    def _ranks(self, boxed: Any) -> list[int]:
        return list(dist.get_process_group_ranks(ProcessGroup.unbox(boxed)))


def _strided(places: torch.Tensor, itemsize: int) -> Region:
    """Return the region of the elements at `places`, in this order.

    Raises:
        NotTraceable: the places are not strided.
    """
    dims: list[tuple[int, int]] = []
    first, starts = (int(places[0]) if places.numel() else 0), places
    # Innermost dimension first. Each round leaves the starts of the runs that it has found.
    while starts.numel() > 1:
        step = int(starts[1] - starts[0])
        run = _run_length(starts, step)
        if starts.numel() % run or step < 1:
            raise NotTraceable("is no strided set of its parameter's elements")
        dims.insert(0, (run, step))
        starts = starts[::run]
    # Only the first run of each dimension was looked at: check all places.
    for chunk in _chunks(places.numel()):
        numbers = torch.arange(chunk.start, chunk.stop, device=places.device)
        expected = torch.full_like(numbers, first)
        for count, step in reversed(dims):
            expected += numbers % count * step
            numbers = numbers // count
        if not torch.equal(expected, places[chunk].to(torch.int64)):
            raise NotTraceable("is no strided set of its parameter's elements")
    if not places.numel():
        dims = [(0, 1)]
    shape, strides = tuple(count for count, _ in dims), tuple(step for _, step in dims)
    return Region(first * itemsize, shape, strides, itemsize)


def _run_length(places: torch.Tensor, step: int) -> int:
    """Count the leading elements that are `step` apart."""
    for chunk in _chunks(places.numel() - 1):
        apart = places[chunk.start + 1 : chunk.stop + 1] - places[chunk]
        if len(breaks := (apart != step).nonzero()):
            return int(chunk.start) + int(breaks[0]) + 1
    return places.numel()


def _chunks(number: int) -> Iterator[slice]:
    for start in range(0, number, CHUNK):
        yield slice(start, min(start + CHUNK, number))
