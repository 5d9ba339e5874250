"""The tensors that a traced export reads: are they still what and where they were?

    known = KnownSources.of(sources())       # when the export is traced
    now = sources()                          # in a later sync
    known.check(now)                         # raises: trace it again

An optimizer changes what is in the memory, and a trace stays true. Whoever moves a tensor, or puts
another in its place, may have changed what the export makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

STEP = 16

Sources = Callable[[], Mapping[str, torch.Tensor]]
"""The tensors that an export reads, by name, as they are now: parameters, sharded or not."""


def sources_of(export: object) -> Sources | None:
    """What an export reads; None where it does not say."""
    sources: Sources | None = getattr(export, "sources", None)
    return sources


class SourcesChanged(ValueError):
    """A source is not what or where it was; names it."""


class KnownSources:
    """By what tensors are recognised; keeps no memory.

    Args:
        sources: by name.
    """

    def __init__(self, sources: Mapping[str, torch.Tensor]) -> None:
        self._names = list(sources)
        locals_ = _locals(list(sources.values()))
        # A reference keeps a storage's identity taken, not its memory.
        self._storages = [StorageWeakRef(local.untyped_storage()) for local in locals_]
        self._what = _descriptions(list(sources.values()), locals_)

    def check(self, now: Mapping[str, torch.Tensor]) -> None:
        """Compare with the tensors as they are now.

        Raises:
            SourcesChanged: they are other tensors, or elsewhere.
        """
        for _ in self.checks(now):
            pass

    def checks(self, now: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """As `check`, in steps of at most a tenth of a millisecond or two; all must be taken."""
        names = self._names
        if now.keys() != set(names):
            raise SourcesChanged(f"the trainer's tensors changed: {len(now)}, {len(names)} before")
        for start in range(0, len(names), STEP):
            some = range(start, min(start + STEP, len(names)))
            tensors = [now[names[i]] for i in some]
            for i, what in zip(some, _descriptions(tensors, _locals(tensors)), strict=True):
                if self._storages[i].expired() or what != self._what[i]:
                    raise SourcesChanged(
                        f"{names[i]} is not where or what it was when the export was traced"
                    )
            yield


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """A shard's bytes; of a tensor that is not sharded, its storage's. Flat uint8."""
    local = local_of(tensor)
    whole = torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.untyped_storage())
    if not isinstance(tensor, DTensor):
        return whole
    start, size = int(local.storage_offset()), local.element_size()
    return whole[start * size : (start + local.numel()) * size]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return _locals([tensor])[0]


def _locals(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def _descriptions(
    tensors: list[torch.Tensor], locals_: list[torch.Tensor]
) -> list[tuple[Any, ...]]:
    return [
        (
            *(local.untyped_storage()._cdata, local.data_ptr(), local.shape, local.stride()),
            *(local.dtype, local.device),
            (tensor.shape, tensor.placements, tensor.device_mesh)
            if isinstance(tensor, DTensor)
            else None,
        )
        for tensor, local in zip(tensors, locals_, strict=True)
    ]
