"""A map from bytes of an exported tensor to bytes of the parameter that the tensor is a view of.

A trainer's export gathers parameters and returns views and copies of them: an expert of a fused
weight, a tied embedding. `ByteMap` maps the bytes of such a tensor to bytes of its parameter.
`compose` turns a copy from the tensor into copies from the parameter:

    expert = ByteMap.of(Region(4096, (8, 16), (32, 1), 2))
    for copy in compose(expert, StridedCopy(0, 32, 0, (), 32)): ...
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import TypeAlias

from msgspec.structs import replace

from sglang_loader.common.regions.geometry import Dim, Region, StridedCopy, split_copy

Dims: TypeAlias = tuple[tuple[int, int], ...]
"""`(count, stride in bytes)`, outermost first."""


@dataclass(frozen=True)
class ByteMap:
    """A map from the n-th byte of a tensor, in C order, to a byte of the parameter's dense memory.

    n is a number with one digit for each dimension, like the index of a C array.

    Attributes:
        offset: place of the tensor's first byte.
        dims: `(count, stride)` of as few dimensions as possible. Digit i is below count i.
    """

    offset: int
    dims: Dims

    @classmethod
    def of(cls, region: Region) -> ByteMap:
        """Make the map of a tensor whose elements lie in `region` of the parameter."""
        steps = [(n, s * region.itemsize) for n, s in zip(region.shape, region.stride, strict=True)]
        merged: list[tuple[int, int]] = []
        for count, stride in (*steps, (region.itemsize, 1)):
            if count == 1:
                continue
            if merged and merged[-1][1] == count * stride:
                merged[-1] = (merged[-1][0] * count, stride)
            else:
                merged.append((count, stride))
        return cls(region.offset, tuple(merged) or ((1, 1),))

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(count for count, _ in self.dims)

    @property
    def stop(self) -> int:
        """The end of the last byte in the parameter."""
        return self.offset + sum((count - 1) * stride for count, stride in self.dims) + 1

    @property
    def is_dense(self) -> bool:
        """True if the tensor's bytes are consecutive in the parameter."""
        return len(self.dims) == 1 and self.dims[0][1] == 1

    @cached_property
    def place_values(self) -> tuple[int, ...]:
        """The amounts by which n grows if a digit grows by one, for each digit."""
        return tuple(
            math.prod(count for count, _ in self.dims[i + 1 :]) for i in range(len(self.dims))
        )

    def digits(self, position: int) -> tuple[int, ...]:
        """Return the digits of a position or of a stride."""
        digits = []
        for value in self.place_values:
            digit, position = divmod(position, value)
            digits.append(digit)
        return tuple(digits)

    def distance(self, digits: Sequence[int]) -> int:
        """Return the bytes in the parameter from position 0 to the position of these digits."""
        return sum(digit * stride for digit, (_, stride) in zip(digits, self.dims, strict=True))


def compose(source: ByteMap, copy: StridedCopy) -> Iterator[StridedCopy]:
    """Yield a copy from a tensor, `src` in its C order, as copies from the parameter.

    The copy is cut where one strided set cannot describe it in the parameter: at the ends of the
    tensor's consecutive bytes, and where a dimension of the copy spans several of the tensor's.
    """
    if source.is_dense:
        yield replace(copy, src=source.offset + copy.src)
        return
    # Add up digits, instead of positions. While no sum reaches its digit's count, nothing is
    # carried, and each stride in the tensor is one stride in the parameter.
    unit = copy.unit
    at = source.digits(copy.src)
    dims = (*copy.dims, (copy.run, unit.src_bytes, unit.dst_bytes))
    steps = [source.digits(stride) for _, stride, _ in dims]
    reach = [
        digit + sum((n - 1) * step[k] for (n, _, _), step in zip(dims, steps, strict=True))
        for k, digit in enumerate(at)
    ]
    if any(top >= count for top, (count, _) in zip(reach, source.dims, strict=True)):
        for part in _cut(source, copy):
            yield from compose(source, part)
        return
    moved = [(n, source.distance(step), dst) for (n, _, dst), step in zip(dims, steps, strict=True)]
    # The run stays a run only if its units are consecutive in the parameter, too.
    run = 1
    if moved[-1][1] == unit.src_bytes or copy.run == 1:
        *moved, (run, _, _) = moved
    src = source.offset + source.distance(at)
    yield replace(copy, src=src, dims=tuple(moved), run=run)


def shard_copies(
    source: ByteMap, starts: Sequence[int], copy: StridedCopy
) -> Iterator[tuple[int, StridedCopy]]:
    """Yield pairs of a shard of the parameter and a copy from the shard, in any order.

    Together the copies do the same as a copy from a tensor of the parameter.

    Args:
        starts: offset of each shard in the parameter, ascending.
    """
    for part in compose(source, copy):
        # With the widest steps first, a copy is cut once where a shard ends, not in every row.
        dims = tuple(sorted(part.dims, key=itemgetter(1), reverse=True))
        for cut in split_copy(replace(part, dims=dims), starts):
            shard = bisect_right(starts, cut.src) - 1
            yield shard, replace(cut, src=cut.src - starts[shard])


def _cut(source: ByteMap, copy: StridedCopy) -> list[StridedCopy]:
    """Cut a copy that spans several of the tensor's dimensions into smaller ones.

    An example with 8 rows of 32 bytes:

    - Bytes 0 to 64 become one copy of 2 rows (`_factored`).
    - Bytes 16 to 80 become three runs, which end at 32, 64 and 80.
    - 3 runs of 16 bytes, 48 apart, become one copy each.
    """
    unit = copy.unit
    whole = (*copy.dims, (copy.run, unit.src_bytes, unit.dst_bytes))
    factored = _factored(source, copy.src, whole)
    if factored is not None:
        *outer, (run, _, _) = factored
        return [replace(copy, dims=tuple(outer), run=run)]
    if copy.dims:
        (count, src, dst), *inner = copy.dims
        row = replace(copy, dims=tuple(inner))
        return [replace(row, src=copy.src + i * src, dst=copy.dst + i * dst) for i in range(count)]
    # A run: cut it where a higher digit than that of its units changes.
    length = min((v for v in source.place_values if v > unit.src_bytes), default=source.nbytes)
    start, stop = copy.src_bounds()
    ends = {-(-start // length) * length, stop // length * length}
    return list(split_copy(copy, sorted(ends)))


def _factored(source: ByteMap, offset: int, dims: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
    """Split one of the dimensions where a dimension of the tensor ends, or return None."""
    # `((64, 1, 1),)` from byte 0 of rows of 32 bytes becomes `((2, 32, 32), (32, 1, 1))`.
    for i, (count, src, dst) in enumerate(dims):
        for value in source.place_values[:-1]:
            if src and src < value and value % src == 0:
                inner = value // src
                fits = offset % value + (inner - 1) * src < value
                if fits and count > inner and count % inner == 0:
                    split = ((count // inner, value, inner * dst), (inner, src, dst))
                    return (*dims[:i], *split, *dims[i + 1 :])
    return None
