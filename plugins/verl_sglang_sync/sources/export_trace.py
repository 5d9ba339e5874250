"""Runs an export without moving a byte, to find which bytes of a parameter each tensor is.

    traced = trace_export(export, sources=module_state, world_size=4, device=device)
    traced.tensors["model.layers.0.mlp.experts.3.up_proj.weight"].origins    # bytes of a parameter

While the export runs, `DTensor.full_tensor` returns a tensor of the full shape without memory, and
a dispatch mode follows the views and plain copies of this tensor. The mode refuses every other
operator, collectives included. So no rank waits for another while ranks trace.

An export can be traced if it changes nothing, and if names and shapes do not depend on values. An
export that names its sources promises both.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import msgspec
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sglang_loader.common.copies.strided import region_of
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.op_traits import COLLECTIVE_NAMESPACES, leaves, read_traits
from sglang_loader.common.quantization import Quantization
from sglang_loader.common.regions.compose import ByteMap, compose
from sglang_loader.common.regions.geometry import Region
from sglang_loader.common.regions.read import Read
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sources.host_memory import HOST_MEMORY
from verl_sglang_sync.sources.owners import NotOwned, Origin, Owners, held_by_all, owners_of
from verl_sglang_sync.sources.snapshot import Sources, locals_of

_COPIES = frozenset(("aten::clone", "aten::_to_copy"))
_OF_SHARDS = frozenset(("aten::detach", "aten::alias"))


class NotTraceable(Exception):
    """The reason why an export's tensors are not bytes of the export's sources."""


class TracedTensor(msgspec.Struct, frozen=True):
    """An exported tensor, and the bytes that it consists of.

    Attributes:
        origins: bytes of one parameter, or of several, which follow each other in the tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    origins: tuple[Origin, ...]


class TracedParameter(msgspec.Struct, frozen=True):
    """A tensor that the export reads, and the ranks that hold its shards.

    Attributes:
        source: name of the tensor among the sources.
    """

    source: str
    owners: Owners


class StandIn(NamedTuple):
    """A tensor without memory that stands for bytes of a parameter while an export is traced."""

    tensor: torch.Tensor
    parameter: TracedParameter
    bytes: ByteMap


@dataclass(frozen=True)
class TracedExport:
    """A traced export.

    One that is made while the export runs grows with it, and a lookup in `tensors` may raise
    NotTraceable. `whole` returns one that is complete, for everything but a `Comparison`.

    Attributes:
        parameters: all that the export reads. An `Origin` has a parameter's number in here.
        tensors: all exported tensors, by name, in the order of the export.
        quantization: how some of these tensors are quantised then, or None.
        others: names of exported tensors that are made of parameters of other ranks alone, and that
            this rank's own trace leaves out.
    """

    parameters: Sequence[TracedParameter]
    tensors: Mapping[str, TracedTensor]
    quantization: Quantization | None = None
    others: Container[str] = ()

    @property
    def is_whole(self) -> bool:
        """True if the trace grows no more, and keeps no parameter alive."""
        return isinstance(self.tensors, dict)

    def whole(self) -> TracedExport:
        """Return the trace of an export that has been made, which `is_whole`."""
        if self.is_whole:
            return self
        tensors = dict(self.tensors)  # looks up what was not looked up yet
        return TracedExport(tuple(self.parameters), tensors, self.quantization)

    @cached_property
    def owners(self) -> list[Owners]:
        return [parameter.owners for parameter in self.parameters]

    def origins_of(self, layout: BucketLayout) -> list[tuple[Origin, ...]]:
        """Return the origins of each of a bucket's tensors, in order.

        Raises:
            NotTraceable: the trace has no tensor of this name, shape and dtype.
        """
        origins = []
        for tensor in layout.tensors:
            traced = self.tensors.get(tensor.name)
            if traced is None or (traced.dtype, traced.shape) != (tensor.dtype, tensor.shape):
                raise NotTraceable(f"{tensor.name} was not traced as it was exported before")
            origins.append(traced.origins)
        return origins


def trace_export(
    export: Iterable[NamedTensor],
    *,
    sources: Sources,
    world_size: int,
    device: torch.device,
    stand_ins: Iterable[StandIn] = (),
) -> TracedExport:
    """Run `export` once, without its data. Every trainer rank must call this.

    Args:
        export: `(name, tensor)` pairs on `device`. Every iteration starts anew.
        sources: returns the tensors that the export reads.
        stand_ins: the tensors that the export starts from, if it gathers no parameters itself.

    Raises:
        NotTraceable: a tensor is computed, moved, or comes from elsewhere.
    """
    tracer = _ExportTracer(sources(), world_size, device)
    for stand_in in stand_ins:
        tracer.add_stand_in(stand_in)
    tensors: dict[str, TracedTensor] = {}
    with tracer.tracing("the export"), torch.no_grad(), tracer.instead_of_gathering():
        for name, tensor in export:
            if name not in tensors:  # a tied embedding comes twice
                tensors[name] = tracer.traced_tensor(name, tensor)
    return TracedExport(tuple(tracer.parameters), tensors)


class TracingMode(TorchDispatchMode):
    """A dispatch mode that refuses operators which it cannot follow."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._problem: str | None = None  # the first refusal: the traced code may swallow the error

    @contextmanager
    def tracing(self, subject: str) -> Iterator[None]:
        """Switch the mode on while the body runs `subject`.

        Raises:
            NotTraceable: the mode refused an operator, or the body failed.
        """
        try:
            with self:
                yield
        except Exception as error:
            reason = self._problem or f"{subject} failed while it was traced: {error!r}"
            raise NotTraceable(reason) from error
        if self._problem is not None:
            raise NotTraceable(self._problem)

    def _refuse(self, reason: str) -> NoReturn:
        self._problem = self._problem or reason
        raise NotTraceable(reason)


class _ExportTracer(TracingMode):
    """A dispatch mode that records which bytes of a parameter each storage holds."""

    def __init__(
        self, sources: Mapping[str, torch.Tensor], world_size: int, device: torch.device
    ) -> None:
        super().__init__()
        self.parameters: list[TracedParameter] = []
        self._numbers: dict[str, int] = {}  # of the parameters, by source
        self._sources = sources
        # Reversed: if two sources share memory, the first one's name counts.
        self._names = {_identity(tensor): name for name, tensor in reversed(list(sources.items()))}
        self._world_size = world_size
        self._device = device
        self._traced: dict[int, Origin] = {}  # by storage, the bytes that it holds, in order
        self._computed: dict[int, str] = {}  # by storage, the operator that wrote to it
        # Keeps storages alive, so that no new storage gets the identity of a recorded one.
        self._kept: list[torch.UntypedStorage] = []

    @contextmanager
    def instead_of_gathering(self) -> Any:
        """Make `DTensor.full_tensor` return tensors without memory, in this thread."""
        thread, gather = threading.get_ident(), DTensor.full_tensor

        def full_tensor(tensor: DTensor, **kwargs: Any) -> torch.Tensor:
            if threading.get_ident() != thread:
                return gather(tensor, **kwargs)
            with _disable_current_modes():
                return self._gathered(tensor)

        with mock.patch.object(DTensor, "full_tensor", full_tensor):
            yield

    def add_stand_in(self, stand_in: StandIn) -> None:
        """Record the bytes that a stand-in stands for."""
        if stand_in.parameter not in self.parameters:
            self.parameters.append(stand_in.parameter)
        number = self.parameters.index(stand_in.parameter)
        self._keep(stand_in.tensor, Origin(number, stand_in.bytes))

    def traced_tensor(self, name: str, tensor: torch.Tensor) -> TracedTensor:
        """Return the origin, shape and dtype of an exported tensor."""
        if isinstance(tensor, DTensor):
            self._refuse(f"{name} is exported as a shard")
        storage = tensor.untyped_storage()
        if storage._cdata in self._computed:
            self._refuse(f"{name} is computed by {self._computed[storage._cdata]}")
        traced = self._traced.get(storage._cdata) or self._unsharded(name, tensor)
        origin = Origin(traced.parameter, self._bytes_of_view(traced, tensor, name))
        return TracedTensor(tensor.dtype, tuple(tensor.shape), (origin,))

    def _gathered(self, parameter: DTensor) -> torch.Tensor:
        """Make the stand-in of a whole parameter, with its shape and dtype."""
        local = parameter.to_local()
        source = self._names.get(_identity(parameter))
        if source is None:
            self._refuse("the export gathers a tensor that is no parameter of the model")
        if (cause := self._computed.get(local.untyped_storage()._cdata)) is not None:
            self._refuse(f"{source} is computed by {cause}")
        if not self._can_read(local):
            self._refuse(f"{source} is on {local.device}, the engine on {self._device}")
        try:
            owners = owners_of(parameter, self._world_size)
        except NotOwned as error:
            self._refuse(f"{source}: {error}")
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        everything = ByteMap.of(Region(0, (max(owners.nbytes, 1),), (1,), 1))
        self._keep(full, Origin(self._add(source, owners), everything))
        return full

    def _unsharded(self, name: str, tensor: torch.Tensor) -> Origin:
        """Record an exported tensor that every rank has as a whole, and return its origin."""
        source = self._names.get(_identity(tensor))
        if source is None:
            self._refuse(f"{name} is no parameter of the model, nor part of one")
        if not self._can_read(tensor):
            self._refuse(f"{name} is on {tensor.device}, the engine on {self._device}")
        own = self._sources[source]
        start, stop = own.storage_offset() * own.element_size(), own.untyped_storage().nbytes()
        if not own.is_contiguous() or (start, start + own.nbytes) != (0, stop):
            self._refuse(f"{source} is only a part of its storage")
        everything = ByteMap.of(Region(0, (max(stop, 1),), (1,), 1))
        traced = Origin(self._add(source, held_by_all(stop, self._world_size)), everything)
        self._keep(tensor, traced)
        return traced

    def _add(self, source: str, owners: Owners) -> int:
        # Tied parameters are gathered once for each name, and are one source.
        if source not in self._numbers:
            self._numbers[source] = len(self.parameters)
            self.parameters.append(TracedParameter(source, owners))
        return self._numbers[source]

    def _keep(self, tensor: torch.Tensor, traced: Origin) -> None:
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        self._traced[storage._cdata] = traced

    def _bytes_of_view(self, traced: Origin, tensor: torch.Tensor, name: str) -> ByteMap:
        """Return the bytes of a view of traced memory, as bytes of the parameter."""
        view = ByteMap.of(region_of(tensor))
        if traced.bytes.is_dense:
            return ByteMap(traced.bytes.offset + view.offset, view.dims)
        *outer, (run, stride) = view.dims
        if stride != 1:
            outer, run = [*view.dims], 1
        whole = Read(0, view.offset, tuple(outer), run, 0).as_copy()
        parts = list(compose(traced.bytes, whole)) if view.nbytes else []
        if len(parts) != 1:
            self._refuse(f"{name} has bytes of its parameter in no regular, strided order")
        dims = tuple((count, stride) for count, stride, _ in parts[0].dims)
        return ByteMap(parts[0].src, (*dims, (parts[0].run, 1)))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in COLLECTIVE_NAMESPACES:
            self._refuse(f"the export communicates: {func}")
        tensors = _tensors_in((args, kwargs))
        if self._problem is not None:  # refused already, and the export is cleaning up
            return func(*args, **kwargs)
        name = func._schema.name
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            if name not in _OF_SHARDS:
                if name in _COPIES and self._is_moved(tensors[0], kwargs):
                    # The engine reads the shard where it is, so the copy stands for the shard.
                    [shard] = locals_of(tensors[:1])
                    if self._can_read(shard):
                        return tensors[0].detach()
                    place = f"offloaded ({shard.device.type})"
                    self._refuse(f"the parameters are {place}, and the export moves each one")
                verb = "converts" if name in _COPIES else "computes with"
                self._refuse(f"the export {verb} shards: {func}")
            return func(*args, **kwargs)
        if not any(tensor.is_meta for tensor in tensors):
            return self._compute(func, tensors, args, kwargs)
        if name in _COPIES:
            return self._copy(func, tensors[0], args, kwargs)
        # Left are views of stand-ins. A view has the storage of its input, whose bytes are
        # recorded.
        out = None
        if not func._schema.is_mutable and read_traits(func).view:
            out = func(*args, **kwargs)
        inputs = {tensor.untyped_storage()._cdata for tensor in tensors}
        made = _tensors_in(out)
        if not made or any(leaf.untyped_storage()._cdata not in inputs for leaf in made):
            self._refuse(f"the export computes with what it gathered: {func}")
        return out

    def _can_read(self, local: torch.Tensor) -> bool:
        """Return True if the engine's device can read a tensor's memory."""
        if local.device.type == self._device.type:
            return True
        return HOST_MEMORY.file_of(local.data_ptr()) is not None

    def _is_moved(self, shard: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Return True if the export only moves a shard to another device."""
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        is_moved = device is not None and torch.device(device).type != shard.device.type
        return is_moved and dtype in (None, shard.dtype)

    def _compute(
        self, func: Any, tensors: list[torch.Tensor], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator on ordinary tensors, and record the storages that it writes to."""
        out = func(*args, **kwargs)
        inputs = {tensor.untyped_storage()._cdata for tensor in tensors}
        written = read_traits(func).written_in(args, kwargs)
        made = [tensor.untyped_storage() for tensor in _tensors_in(out)]
        made = [storage for storage in made if storage._cdata not in inputs]
        made += [tensor.untyped_storage() for tensor in _tensors_in(written)]
        for storage in made:
            self._kept.append(storage)
            self._computed[storage._cdata] = str(func)
        return out

    def _copy(self, func: Any, source: torch.Tensor, args: Any, kwargs: dict[str, Any]) -> Any:
        """Copy a stand-in, and record the copy's bytes in the order of the copy's own memory."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type not in ("meta", self._device.type):
            self._refuse(f"the export moves tensors to {device}, the engine is on {self._device}")
        if device is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        copy = func(*args, **kwargs)
        if copy.dtype != source.dtype:
            self._refuse(f"the export converts {source.dtype} to {copy.dtype}")
        # Dimensions in the order of memory, the outermost first.
        order = sorted(range(copy.dim()), key=copy.stride, reverse=True)
        ordered = copy.permute(order)
        if not ordered.is_contiguous():
            self._refuse(f"the export makes a copy with gaps: {func}")
        traced = self._traced.get(source.untyped_storage()._cdata)
        if traced is None:
            self._refuse(f"the export copies a tensor that it did not gather: {func}")
        bytes_ = self._bytes_of_view(traced, source.permute(order), "a copy")
        self._keep(copy, Origin(traced.parameter, bytes_))
        return copy


def _tensors_in(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a value that is equal for a tensor and its detached self."""
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        return local.untyped_storage()._cdata, int(local.storage_offset()), tuple(tensor.shape)
    return (tensor.untyped_storage()._cdata,)
