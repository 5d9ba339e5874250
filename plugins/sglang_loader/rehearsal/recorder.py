"""Runs operators without letting them write: what a `load_weights` would do with its sources.

A `TorchDispatchMode` below autograd. A write into the model or into a source is not made, only
noted; its checks are, so that a shape that does not fit raises as it would. Everything else runs:
temporaries are real, and remember which sources they were made of.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from sglang_loader.common.geometry import Region
from sglang_loader.common.op_traits import OpTraits, read_traits
from sglang_loader.load_plan.destinations import AddressIndex, Destinations
from sglang_loader.rehearsal.sources import Sources

_COPY = torch.ops.aten.copy_.default


class NotRehearsable(Exception):
    """`load_weights` does something that cannot be kept from happening."""


@dataclass
class Use:
    """What became of one source.

    Attributes:
        parts: regions of it that were read; the whole as None.
        targets: (storage, region) of the model where its data went.
        dtypes: of these destinations.
        is_applied: something was made of it that stays.
        is_broadcast: it was repeated to fill a destination.
    """

    parts: set[Region | None] = field(default_factory=set)
    targets: list[tuple[int, Region]] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)
    is_applied: bool = False
    is_broadcast: bool = False


class Recorder(TorchDispatchMode):
    """Active during a rehearsal, in the rehearsing thread.

    Attributes:
        uses: by source.
        written: by storage of the model: the regions that would be written.
        problem: why the rehearsal means nothing; the caller must look, loaders may swallow errors.
    """

    def __init__(self, sources: Sources, destinations: Destinations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses: dict[int, Use] = defaultdict(Use)
        self.written: dict[int, list[Region]] = defaultdict(list)
        self.problem: str | None = None
        self._sources = sources
        self._index = AddressIndex(destinations)
        self._made_of: dict[int, frozenset[int]] = {}
        self._held: list[StorageWeakRef] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's: no guard against tracing by dynamo around every operator; it takes 15 us."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        traits = read_traits(func)
        if traits.view:
            return func(*args, **kwargs)
        if func is _COPY:
            return self._copy(args, kwargs)
        if traits.problem is not None or traits.random:
            raise self._give_up(traits.problem or f"a random operator ({func}) ran")
        return self._run(func, traits, args, kwargs)

    def _note_host_read(self, tensor: torch.Tensor) -> None:
        """The data of `tensor` reaches Python, which may write it back as a number."""
        for source in self._origins(tensor):
            self.uses[source].is_applied = True

    def note_bound(self, tensor: torch.Tensor) -> bool:
        """The model holds `tensor` now; False if it is not made of any source."""
        origins = self._origins(tensor)
        for source in origins:
            self.uses[source].is_applied = True
            self.uses[source].dtypes.add(tensor.dtype)
        return bool(origins)

    def _copy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target, source = args[0], args[1]
        address = target.data_ptr()
        found = self._index.find(address)
        origins = self._origins(source)
        if found is None:
            if self._sources.find(address) is None:
                self._taint(target, origins)
                return _COPY(*args, **kwargs)
            source.expand(target.shape)
            return target
        source.expand(target.shape)  # raises where the shapes do not fit
        self._note_write(target, found, origins)
        if source.numel() != target.numel():
            for index in origins:
                self.uses[index].is_broadcast = True
        return target

    def _run(
        self, func: Any, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        reads = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        written = tree_leaves(traits.written_in(args, kwargs))
        targets = [t for t in written if isinstance(t, torch.Tensor)]
        others = [t for t in reads if all(t is not w for w in targets)]
        origins = frozenset().union(*(self._origins(t) for t in others))
        if traits.reads_host or traits.dynamic_shape:
            for tensor in reads:
                self._note_host_read(tensor)
        stand_ins: dict[int, torch.Tensor] = {}
        for target in targets:
            address = target.data_ptr()
            found = self._index.find(address)
            if found is not None:
                self._note_write(target, found, origins)
            if found is not None or self._sources.find(address) is not None:
                stand_ins[id(target)] = target.clone()
            else:
                self._taint(target, origins)
        if not stand_ins:
            out = func(*args, **kwargs)
        else:
            args, kwargs = tree_map(lambda v: stand_ins.get(id(v), v), (args, kwargs))
            out = func(*args, **kwargs)
            originals = {id(stand_ins[id(t)]): t for t in targets if id(t) in stand_ins}
            out = tree_map(lambda v: originals.get(id(v), v), out)
        if origins:
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self._taint(leaf, origins)
        return out

    def _note_write(
        self, target: torch.Tensor, found: tuple[int, int], origins: frozenset[int]
    ) -> None:
        storage, offset = found
        shape = tuple(target.shape)
        if 0 in shape:
            return
        region = Region(offset, shape, tuple(target.stride()), target.element_size())
        self.written[storage].append(region)
        for source in origins:
            use = self.uses[source]
            use.is_applied = True
            use.targets.append((storage, region))
            use.dtypes.add(target.dtype)

    def origins(self, tensor: torch.Tensor) -> frozenset[int]:
        """The sources that `tensor` is a view of or was made of."""
        if tensor.device.type != "meta":
            source = self._sources.find(tensor.data_ptr())
            if source is not None:
                return frozenset((source,))
        return self._made_of.get(tensor.untyped_storage()._cdata, frozenset())

    def _origins(self, tensor: torch.Tensor) -> frozenset[int]:
        """`origins` of a tensor that is read."""
        source = self._sources.find(tensor.data_ptr())
        if source is None:
            return self._made_of.get(tensor.untyped_storage()._cdata, frozenset())
        self._read(source, tensor)
        return frozenset((source,))

    def _read(self, source: int, view: torch.Tensor) -> None:
        spec = self._sources.tensors[source]
        if view.numel() * view.element_size() >= spec.nbytes:
            self.uses[source].parts.add(None)
            return
        offset = view.data_ptr() - self._sources.address_of(source)
        region = Region(offset, tuple(view.shape), tuple(view.stride()), view.element_size())
        self.uses[source].parts.add(region)

    def _taint(self, tensor: torch.Tensor, origins: frozenset[int]) -> None:
        if not origins:
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._made_of:
            self._held.append(StorageWeakRef(storage))  # no other storage gets its identity
        self._made_of[storage._cdata] = self._made_of.get(storage._cdata, frozenset()) | origins

    def _give_up(self, reason: str) -> NotRehearsable:
        self.problem = self.problem or reason
        return NotRehearsable(reason)
