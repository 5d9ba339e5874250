"""Snapshots of the tensors that a traced export reads, to find changes that outdate the trace.

    snapshot = SourcesSnapshot(sources(), with_addresses=False)  # when the export is traced
    snapshot.require_unchanged(sources())    # in a later sync: an error means that the trace is old
    snapshot = SourcesSnapshot(sources())    # when the memory is located: addresses count, too

An optimizer changes the values in the memory, and leaves a trace true. If a tensor was moved, or
replaced by another, the export may make something else of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from verl_sglang_sync.sources.host_memory import HOST_MEMORY

Sources = Callable[[], Mapping[str, torch.Tensor]]
"""Function that returns the tensors that an export reads, by name: parameters, sharded or not.

Optional attributes of the function:
    trace(device): returns the `TracedExport`, in place of a traced run of the export.
    trace_in_export(device): returns the trace of the export that is being made, which grows with
        it. It takes less time than `trace`, and holds only if a comparison with the export finds no
        difference.
    is_offloaded: see the function of this name.
"""

NUM_TOGETHER = 64
"""Number of tensors that are compared together."""

Columns = tuple[list[Any], ...]
"""Properties of some tensors, a list for each property."""


def module_state(module: nn.Module, *, is_offloaded: bool = False) -> Sources:
    """Return the sources of an export that starts from `state_dict`: the parameters, by name."""
    sources = partial(module.state_dict, keep_vars=True)
    sources.is_offloaded = is_offloaded  # type: ignore[attr-defined]
    return sources


def sources_of(export: object) -> Sources | None:
    sources: Sources | None = getattr(export, "sources", None)
    return sources


def is_offloaded(export: object) -> bool:
    """Return True if the trainer may offload an export's sources between syncs.

    They are then in other storages in each sync, or the same storages have other memory.
    """
    return bool(getattr(sources_of(export), "is_offloaded", False))


class SourcesChanged(ValueError):
    """A change of the tensors that an export reads. The message names the tensor."""


def require_sources(export: object) -> Sources:
    """Return the sources of an export.

    Raises:
        SourcesChanged: the export does not name its sources.
    """
    if (sources := sources_of(export)) is None:
        raise SourcesChanged("the export does not name the tensors that it reads")
    return sources


class SourcesSnapshot:
    """A snapshot of some tensors' properties, without their values. It keeps no memory alive.

    The properties are dtype, shape, strides and placement, whether there is memory, and the
    addresses or, without these, which tensors share a storage.

    Args:
        tensors: the tensors, by name.
        with_addresses: False if the tensors may move, as for a trace.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, with_addresses: bool = True) -> None:
        self._with_addresses = with_addresses
        self._names = list(tensors)
        self._snapshot = list(self._columns(list(tensors.values())))
        located = tensors if with_addresses else {}
        # By storage, with the name of a tensor in it: Megatron has thousands of tensors in one.
        # While these weak references live, no new storage gets the identity of one in the snapshot.
        self._refs: dict[int, tuple[str, StorageWeakRef]] = {}
        for name, local in zip(located, locals_of(list(located.values())), strict=True):
            storage = local.untyped_storage()
            if storage._cdata not in self._refs:
                self._refs[storage._cdata] = name, StorageWeakRef(storage)

    def require_unchanged(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compare the tensors as they are with the snapshot.

        Raises:
            SourcesChanged: a property differs, or a tensor was added or removed.
        """
        if (changed := self._first_change(tensors)) is not None:
            which = "what or where" if self._with_addresses else "what"
            raise SourcesChanged(f"{changed} is not {which} it was when it was last recorded")

    def hold(self) -> list[torch.UntypedStorage]:
        """Return the storages of a snapshot. The caller keeps their memory by holding the storages.

        A snapshot without addresses returns none. To ask the trainer for its present tensors takes
        milliseconds, so this method does not. The trainer may have replaced a tensor since the
        snapshot, and `require_unchanged` finds that.

        Raises:
            SourcesChanged: the memory of a tensor was freed.
        """
        held: list[torch.UntypedStorage] = []
        for name, ref in self._refs.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            # torch returns None if nothing keeps the storage any more.
            if storage is None:
                raise SourcesChanged(f"{name} is not where it was when it was last recorded")
            held.append(storage)
        return held

    def _first_change(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        if list(tensors) != self._names:
            numbers = f"{len(self._names)} then, {len(tensors)} now"
            return f"the list of the trainer's tensors ({numbers})"
        pairs = zip(self._columns(list(tensors.values())), self._snapshot, strict=True)
        for number, (columns, old_columns) in enumerate(pairs):
            if columns != old_columns:
                rows, old_rows = zip(*columns, strict=True), zip(*old_columns, strict=True)
                is_same = [row == old for row, old in zip(rows, old_rows, strict=True)]
                return self._names[number * NUM_TOGETHER + is_same.index(False)]
        return None

    def _columns(self, tensors: Sequence[torch.Tensor]) -> Iterator[Columns]:
        """Yield the properties of all tensors, for `NUM_TOGETHER` tensors at a time."""
        # Thousands of tensors have many properties. Few of these objects live at a time, so that
        # Python's garbage collector does not run because of them.
        first_users: dict[int, int] = {}
        for start in range(0, len(tensors), NUM_TOGETHER):
            chunk = tensors[start : start + NUM_TOGETHER]
            locals_ = locals_of(chunk)
            held = [local.untyped_storage() for local in locals_]
            storages = [storage._cdata for storage in held]
            if self._with_addresses:
                places = list(map(torch.Tensor.data_ptr, locals_))
            else:
                # The number of the first tensor in a storage stands for the storage.
                storages = [
                    first_users.setdefault(storage, number)
                    for number, storage in enumerate(storages, start)
                ]
                places = [int(local.storage_offset()) for local in locals_]
            yield (
                *(storages, places, list(map(torch.Tensor.stride, locals_))),
                # Megatron's offload empties a storage that stays the same. A part without elements
                # needs no memory.
                [
                    storage.nbytes() > 0 or local.numel() == 0
                    for storage, local in zip(held, locals_, strict=True)
                ],
                [local.shape for local in locals_],
                [local.dtype for local in locals_],
                [local.device for local in locals_],
                [
                    (t.shape, t.placements, t.device_mesh) if isinstance(t, DTensor) else None
                    for t in chunk
                ],
            )


def locals_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's part of each tensor. A tensor that is no `DTensor` is its own part."""
    with torch.no_grad():
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of this rank's part of a tensor, as flat uint8. The part is contiguous.

    The bytes of an offloaded parameter are on the device that reads them, see `host_memory`.
    """
    [local] = locals_of([tensor])
    whole = torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.untyped_storage())
    start, size = int(local.storage_offset()), local.element_size()
    return HOST_MEMORY.view_of(whole[start * size : (start + local.numel()) * size])
