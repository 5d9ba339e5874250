"""The tensors that a traced export reads: are they still what and where they were?

    snapshot = SourcesSnapshot(sources(), with_addresses=False)  # when the export is traced
    snapshot.require_unchanged(sources())    # in a later sync; where it raises, trace it again
    snapshot = SourcesSnapshot(sources())    # when their memory is located: addresses count, too

An optimizer changes what is in the memory, and a trace stays true. Whoever moves a tensor, or puts
another in its place, may have changed what the export makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

Sources = Callable[[], Mapping[str, torch.Tensor]]
"""The tensors that an export reads, by name, as they are now: parameters, sharded or not.

It may also have a method `trace(device)`, where it knows better than a traced run in which of them
the exported tensors lie (a `TracedExport`), with an attribute `needs_an_export` if it only knows
once an export has been made; and it may be marked with an attribute `empties_storages`.
"""

NUM_TOGETHER = 64
"""Tensors that are looked at together."""

Columns = tuple[list[Any], ...]
"""Properties of some tensors, a list for each property: there are hundreds of tensors."""


def module_state(module: nn.Module) -> Sources:
    """What an export reads that starts from `state_dict`: the parameters themselves, by name."""
    return partial(module.state_dict, keep_vars=True)


def sources_of(export: object) -> Sources | None:
    sources: Sources | None = getattr(export, "sources", None)
    return sources


def empties_storages(export: object) -> bool:
    """True if what an export reads may be offloaded and come back into the same storages: one that
    is at the same address may still have other memory than before.
    """
    return bool(getattr(sources_of(export), "empties_storages", False))


class SourcesChanged(ValueError):
    """A source is not what or where it was; names it."""


def require_sources(export: object) -> Sources:
    """What an export reads; `SourcesChanged` where it does not say."""
    if (sources := sources_of(export)) is None:
        raise SourcesChanged("the export does not say which tensors it reads")
    return sources


class SourcesSnapshot:
    """What some tensors are, and where their memory is, to be compared later; keeps no memory.

    Args:
        now: by name.
        with_addresses: False: they may lie elsewhere later, as a trace does not depend on that.
    """

    def __init__(self, now: Mapping[str, torch.Tensor], *, with_addresses: bool = True) -> None:
        self._with_addresses = with_addresses
        self._names = list(now)
        self._then = list(self._columns(list(now.values())))
        locals_ = locals_of(list(now.values())) if with_addresses else []
        # As long as these live, no new storage gets the identity of one in the snapshot.
        self._refs = [StorageWeakRef(local.untyped_storage()) for local in locals_]

    def require_unchanged(self, now: Mapping[str, torch.Tensor]) -> None:
        """Compare with the tensors as they are now: dtype, shape, strides, placement, and their
        addresses, or without those, which tensors share a storage.

        Raises:
            SourcesChanged: something differs.
        """
        if (other := self._first_other(now)) is not None:
            which = "what or where" if self._with_addresses else "what"
            raise SourcesChanged(f"{other} is not {which} it was when the export was traced")

    def _first_other(self, now: Mapping[str, torch.Tensor]) -> str | None:
        if list(now) != self._names:
            return f"the list of the trainer's tensors ({len(self._names)} then, {len(now)} now)"
        columns = self._columns(list(now.values()))
        for number, (some, then) in enumerate(zip(columns, self._then, strict=True)):
            if some != then:
                rows = zip(zip(*some, strict=True), zip(*then, strict=True), strict=True)
                first = [row == before for row, before in rows].index(False)
                return self._names[number * NUM_TOGETHER + first]
        return None

    def _columns(self, tensors: Sequence[torch.Tensor]) -> Iterator[Columns]:
        """What is compared, of `NUM_TOGETHER` tensors: few objects live at a time, for Python's
        garbage collector. Without addresses, the first tensor's position stands for its storage.
        """
        first: dict[int, int] = {}
        for start in range(0, len(tensors), NUM_TOGETHER):
            some = tensors[start : start + NUM_TOGETHER]
            locals_ = locals_of(some)
            storages = [local.untyped_storage()._cdata for local in locals_]
            if self._with_addresses:
                places = list(map(torch.Tensor.data_ptr, locals_))
            else:
                storages = [first.setdefault(each, i) for i, each in enumerate(storages, start)]
                places = [int(local.storage_offset()) for local in locals_]
            yield (
                *(storages, places, list(map(torch.Tensor.stride, locals_))),
                [local.shape for local in locals_],
                [local.dtype for local in locals_],
                [local.device for local in locals_],
                [
                    (t.shape, t.placements, t.device_mesh) if isinstance(t, DTensor) else None
                    for t in some
                ],
            )


def locals_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of what this rank has of a tensor, which is contiguous. Flat uint8."""
    [local] = locals_of([tensor])
    whole = torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.untyped_storage())
    start, size = int(local.storage_offset()), local.element_size()
    return whole[start * size : (start + local.numel()) * size]
