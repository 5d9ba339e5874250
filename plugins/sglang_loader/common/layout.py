"""Bucket layouts: the place of each named tensor inside one flat staging buffer.

This module also has the wire format of layouts.

    layout = BucketLayout.pack([("model.norm.weight", (1024,), torch.bfloat16)])
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    model.load_weights(layout.views(buffer))

A load plan is compiled for an ordered list of layouts and holds for exactly these layouts. In a
message a layout is `encode_layout(layout)`, and its name is the digest of these bytes.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import msgspec
import torch

ALIGNMENT_BYTES = 256
"""The alignment of cudaMalloc. It allows views of every dtype, and vectorised copies."""


TensorSpec = tuple[str, Iterable[int], torch.dtype]
"""Name (in the Hugging Face format), shape and dtype of a tensor."""


class WireError(ValueError):
    """A message that does not follow the wire format. The sync must not go on."""


class BucketTensor(msgspec.Struct, frozen=True):
    """One tensor of a bucket, contiguous at byte `offset`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class BucketLayout:
    """The tensors of one bucket in loading order, and the size of their buffer in bytes.

    Raises:
        ValueError: a tensor has a negative dimension, overlaps its predecessor, ends past `nbytes`,
            or has an offset that is not a multiple of its element size.
    """

    tensors: tuple[BucketTensor, ...]
    nbytes: int

    def __post_init__(self) -> None:
        # Layouts also come in messages: a view must never leave the buffer.
        end = 0
        for t in self.tensors:
            if min(t.shape, default=0) < 0:
                raise ValueError(f"tensor {t.name!r}: shape {t.shape}: expected no negative size")
            if t.offset < end:
                raise ValueError(f"tensor {t.name!r} at byte {t.offset} overlaps its neighbour")
            end = t.offset + t.nbytes
            if t.offset % t.dtype.itemsize or end > self.nbytes:
                raise ValueError(
                    f"{t.name}: offset {t.offset} with {t.nbytes} bytes must be a multiple of "
                    f"{t.dtype.itemsize} and end within the bucket's {self.nbytes} bytes"
                )

    @classmethod
    def pack(cls, tensors: Iterable[TensorSpec]) -> BucketLayout:
        """Place tensors one after the other, each at a multiple of `ALIGNMENT_BYTES`."""
        offset = 0
        packed = []
        for name, shape, dtype in tensors:
            packed.append(BucketTensor(name, tuple(shape), dtype, offset))
            offset += -(-packed[-1].nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(tuple(packed), offset)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Offsets of the tensors, ascending."""
        return tuple(tensor.offset for tensor in self.tensors)

    def tensor_at(self, offset: int) -> int:
        """Return the position of the tensor in which a byte lies, or of the last one before."""
        return max(0, bisect_right(self.starts, offset) - 1)

    def holding(self, start: int, stop: int) -> int | None:
        """Return the position of the tensor that holds bytes [start, stop), or None."""
        position = self.tensor_at(start)
        tensor = self.tensors[position]
        # `tensor_at` looks at the start alone, and the range may end in a later tensor.
        is_within = tensor.offset <= start and stop <= tensor.offset + tensor.nbytes
        return position if is_within else None

    def views(self, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return `(name, tensor)` views into `buffer`, in loading order.

        Raises:
            ValueError: the buffer is not flat contiguous uint8, or shorter than `nbytes`.
        """
        check_buffer(buffer, self.nbytes)
        typed = {  # one view of the whole buffer for each dtype saves half the calls
            dtype: buffer[: buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            for dtype in {t.dtype for t in self.tensors}
        }
        return [
            (
                t.name,
                typed[t.dtype]
                .narrow(0, t.offset // t.dtype.itemsize, math.prod(t.shape))
                .view(t.shape),
            )
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


def dtype_of(_: type[torch.dtype], name: object) -> torch.dtype:
    """Return the dtype of a name, as msgspec's hook for decoding. Raise ValueError if unknown."""
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype, as msgspec's hook for encoding."""
    return str(dtype).removeprefix("torch.")


_encoder = msgspec.msgpack.Encoder(enc_hook=dtype_name)
_layout_decoder = msgspec.msgpack.Decoder(BucketLayout, dec_hook=dtype_of)


def _decoded(decoder: msgspec.msgpack.Decoder[Any], encoded: bytes, kind: str) -> Any:
    """Decode bytes, or raise WireError if `_encoder` would not write these bytes."""
    try:
        decoded = decoder.decode(encoded)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"not {kind}: {error}") from None
    # The digest of the bytes is the layout's name, so one layout must have one encoding.
    if _encoder.encode(decoded) != encoded:
        raise WireError(f"not {kind}: an unknown field, or not encoded as we do")
    return decoded


def encode_layout(layout: BucketLayout) -> bytes:
    return _encoder.encode(layout)


def digest_of(encoded: bytes) -> str:
    """Return the name of encoded bytes: 64 hexadecimal digits, the same in every process."""
    return hashlib.sha256(encoded).hexdigest()


@lru_cache(maxsize=4096)
def decode_layout(encoded: bytes) -> BucketLayout:
    """Parse and check a layout. The same bytes, as in every sync, give the same object.

    Raises:
        WireError: not a layout, an unknown dtype, a negative dimension, a tensor that overlaps its
            neighbour or exceeds the bucket, or bytes that `encode_layout` does not write.
    """
    layout: BucketLayout = _decoded(_layout_decoder, encoded, "a bucket layout")
    return layout
