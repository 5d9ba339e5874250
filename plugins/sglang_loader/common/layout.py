"""Bucket layouts: where each named tensor lies inside one flat staging buffer.

    layout = BucketLayout.pack([("model.norm.weight", (1024,), torch.bfloat16)])
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    model.load_weights(layout.views(buffer))

A load plan is compiled for an ordered list of layouts and holds for exactly those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class BucketTensor:
    """One tensor of a bucket, contiguous at byte `offset`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The tensors of one bucket in loading order, and the bytes of buffer they need.

    Raises:
        ValueError: a tensor's offset is not a multiple of its element size, or it ends past
            `nbytes`.
    """

    tensors: tuple[BucketTensor, ...]
    nbytes: int

    def __post_init__(self) -> None:
        for t in self.tensors:
            if t.offset % t.dtype.itemsize or t.offset + t.nbytes > self.nbytes or t.offset < 0:
                raise ValueError(
                    f"{t.name}: offset {t.offset} with {t.nbytes} bytes must be a multiple of "
                    f"{t.dtype.itemsize} and end within the bucket's {self.nbytes} bytes"
                )

    @classmethod
    def pack(
        cls,
        tensors: Iterable[tuple[str, Iterable[int], torch.dtype]],
        alignment_bytes: int = ALIGNMENT_BYTES,
    ) -> BucketLayout:
        """Lay `(name, shape, dtype)` out one after the other, each at a multiple of
        `alignment_bytes`.
        """
        offset = 0
        packed = []
        for name, shape, dtype in tensors:
            packed.append(BucketTensor(name, tuple(shape), dtype, offset))
            offset += -(-packed[-1].nbytes // alignment_bytes) * alignment_bytes
        return cls(tuple(packed), offset)

    def views(self, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """`(name, tensor)` views into `buffer`, in loading order.

        Args:
            buffer: one-dimensional contiguous uint8, at least `nbytes` long.

        Raises:
            ValueError: the buffer is of another dtype or shape, or too short.
        """
        check_buffer(buffer, self.nbytes)
        return [
            (t.name, buffer[t.offset : t.offset + t.nbytes].view(t.dtype).view(t.shape))
            for t in self.tensors
        ]


def check_buffer(buffer: torch.Tensor, nbytes: int) -> None:
    """Raise ValueError unless `buffer` is flat contiguous uint8 of at least `nbytes`."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(
            f"a bucket's buffer must be contiguous one-dimensional uint8, "
            f"got {buffer.dtype} of shape {tuple(buffer.shape)}"
        )
    if buffer.numel() < nbytes:
        raise ValueError(f"the bucket needs {nbytes} bytes, the buffer has {buffer.numel()}")
