"""By what tensors are recognised, without keeping their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

# By `map`, and past the Python of `StorageWeakRef.expired`, which takes four times as long.
_is_expired = cast(Callable[[int], bool], torch.UntypedStorage._expired)

STEP = 64
"""Tensors that are looked at together."""


class TensorMarks:
    """Tensors at one time: what they are, and where their memory is.

    Args:
        tensors: sharded or not.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        locals_ = locals_of(tensors)
        # These keep the identities of the storages taken, not their memory.
        self._refs = [StorageWeakRef(local.untyped_storage()) for local in locals_]
        self._weak = [ref.cdata for ref in self._refs]
        self._marks = _marks(tensors, locals_)

    def first_changed(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """Position of the first tensor that is another now, or elsewhere; None: all are as then."""
        marks = _marks(tensors, locals_of(tensors))
        expired = list(map(_is_expired, self._weak))  # what is there now is other memory
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
        *_description_columns(tensors, locals_),
    )


def _description_columns(
    tensors: Sequence[torch.Tensor], locals_: Sequence[torch.Tensor]
) -> tuple[list[Any], ...]:
    return (
        list(map(torch.Tensor.stride, locals_)),
        [local.shape for local in locals_],
        [local.dtype for local in locals_],
        [local.device for local in locals_],
        [
            (t.shape, t.placements, t.device_mesh) if isinstance(t, DTensor) else None
            for t in tensors
        ],
    )


def describe_tensors(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[Any], ...]]:
    """All of each tensor but its address and values, to be compared with another time's.

    Tensors that share a storage are told by the position of the first of them.

    Yields:
        Columns of `STEP` tensors: few objects live at a time, for Python's garbage collector.
    """
    first: dict[int, int] = {}
    for start in range(0, len(tensors), STEP):
        some = tensors[start : start + STEP]
        locals_ = locals_of(some)
        storages = [
            first.setdefault(local.untyped_storage()._cdata, i)
            for i, local in enumerate(locals_, start)
        ]
        offsets = list(map(torch.Tensor.storage_offset, locals_))
        yield storages, offsets, *_description_columns(some, locals_)
