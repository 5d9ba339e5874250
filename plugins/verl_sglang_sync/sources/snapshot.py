"""The tensors that a traced export reads: are they still what and where they were?

    snapshot = SourcesSnapshot(sources(), with_addresses=False)  # when the export is traced
    snapshot.require_unchanged(sources())    # in a later sync; where it raises, trace it again
    snapshot = SourcesSnapshot(sources())    # when their memory is located: addresses count, too

An optimizer changes what is in the memory, and a trace stays true. Whoever moves a tensor, or puts
another in its place, may have changed what the export makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

Sources = Callable[[], Mapping[str, torch.Tensor]]
"""The tensors that an export reads, by name, as they are now: parameters, sharded or not.

It may also have a method `trace(device)`, where it knows better than a traced run in which of them
the exported tensors lie (a `TracedExport`): called once the export has been made. And it may be
marked with an attribute `empties_storages`.
"""


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
        self._then = self._rows(now)
        locals_ = locals_of(now.values()) if with_addresses else []
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
        rows, then = self._rows(now), self._then
        if [name for name, *_ in rows] != [name for name, *_ in then]:
            return f"the list of the trainer's {len(then)} tensors, {len(now)} now,"
        pairs = zip(rows, then, strict=True)
        return next((row[0] for row, before in pairs if row != before), None)

    def _rows(self, tensors: Mapping[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        """By tensor, its name and what is compared. Without addresses, the number of the first
        tensor in a storage stands for it.
        """
        rows, first = list[tuple[Any, ...]](), dict[int, int]()
        for (name, tensor), local in zip(tensors.items(), locals_of(tensors.values()), strict=True):
            storage = local.untyped_storage()._cdata
            if self._with_addresses:
                place = local.data_ptr()
            else:
                storage, place = first.setdefault(storage, len(rows)), int(local.storage_offset())
            layout = local.shape, local.stride(), local.dtype, local.device
            sharded = None
            if isinstance(tensor, DTensor):
                sharded = tensor.shape, tensor.placements, tensor.device_mesh
            rows.append((name, storage, place, *layout, sharded))
        return rows


def locals_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of what this rank has of a tensor, which is contiguous. Flat uint8."""
    [local] = locals_of([tensor])
    whole = torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.untyped_storage())
    start, size = int(local.storage_offset()), local.element_size()
    return whole[start * size : (start + local.numel()) * size]
