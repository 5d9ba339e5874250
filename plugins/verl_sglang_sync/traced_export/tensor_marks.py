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
        self._marks = _marks(tensors, locals_)

    def first_changed(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """Position of the first tensor that is another now, or elsewhere; None: all are as then."""
        marks = _marks(tensors, locals_of(tensors))
        if marks == self._marks:
            expired = [storage.expired() for storage in self._storages]
            return expired.index(True) if any(expired) else None
        pairs = zip(marks, self._marks, strict=False)
        return next((i for i, (now, then) in enumerate(pairs) if now != then), len(marks))


def locals_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What this rank has of them."""
    with torch.no_grad():
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def _marks(
    tensors: Sequence[torch.Tensor], locals_: Sequence[torch.Tensor]
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
