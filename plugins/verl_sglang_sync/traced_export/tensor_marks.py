"""By what tensors are recognised, without keeping their memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef


class TensorMarks:
    """Tensors at one time: what they are, and where their memory is.

    Args:
        tensors: sharded or not.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        locals_ = locals_of(tensors)
        # A reference keeps a storage's identity taken, not its memory.
        self._storages = [StorageWeakRef(local.untyped_storage()) for local in locals_]
        self._weak = [storage.cdata for storage in self._storages]
        self._marks = _marks(tensors, locals_)

    def first_changed(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """Position of the first tensor that is another now, or elsewhere; None: all are as then."""
        marks = _marks(tensors, locals_of(tensors))
        # Past the Python of `StorageWeakRef.expired`, which takes four times as long.
        expired = list(map(torch.UntypedStorage._expired, self._weak))
        if marks == self._marks and not any(expired):
            return None
        rows, then = list(zip(*marks, strict=True)), list(zip(*self._marks, strict=True))
        same = [now == before for now, before in zip(rows, then, strict=False)]
        kept = [is_same and not gone for is_same, gone in zip(same, expired, strict=False)]
        return kept.index(False) if False in kept else len(kept)


def locals_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What this rank has of them."""
    with torch.no_grad():
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def _marks(
    tensors: Sequence[torch.Tensor], locals_: Sequence[torch.Tensor]
) -> tuple[list[Any], ...]:
    """In columns: there are hundreds of tensors."""
    return (
        [local.untyped_storage()._cdata for local in locals_],
        list(map(torch.Tensor.data_ptr, locals_)),
        list(map(torch.Tensor.stride, locals_)),
        [local.shape for local in locals_],
        [local.dtype for local in locals_],
        [local.device for local in locals_],
        [
            (t.shape, t.placements, t.device_mesh) if isinstance(t, DTensor) else None
            for t in tensors
        ],
    )
