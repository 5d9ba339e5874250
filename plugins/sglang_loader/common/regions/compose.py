"""Which bytes of a tensor some bytes of a view of it are.

A trainer's export gathers parameters and hands on views and copies of them: an expert of a fused
weight, a tied embedding. `ByteMap` says which bytes of its parameter such a tensor is; `compose`
says which bytes of the parameter a strided set of the tensor's bytes is:

    expert = ByteMap.of(Region(4096, (8, 16), (32, 1), 2))
    for read in compose_read(expert, Read(7, 32, (), 32, 0)): ...
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from sglang_loader.common.regions.arrangement import Read
from sglang_loader.common.regions.geometry import Dim, Region, StridedCopy, split_copy

Dims: TypeAlias = tuple[tuple[int, int], ...]
"""`(count, stride in bytes)`, outermost first."""


@dataclass(frozen=True)
class ByteMap:
    """The n-th byte of a tensor, in C order, as a byte of the parameter's full, dense memory.

    Attributes:
        offset: of the tensor's first byte.
        dims: with as few dimensions as possible; their counts are the digits of n.
    """

    offset: int
    dims: Dims

    @classmethod
    def of(cls, region: Region) -> ByteMap:
        """The bytes of a tensor's elements, in C order."""
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
        """Bytes of the tensor."""
        return math.prod(count for count, _ in self.dims)

    @property
    def is_dense(self) -> bool:
        """True if the tensor's bytes are consecutive in the parameter."""
        return len(self.dims) == 1 and self.dims[0][1] == 1

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """What one step of each digit is worth."""
        return tuple(
            math.prod(count for count, _ in self.dims[i + 1 :]) for i in range(len(self.dims))
        )

    def digits(self, position: int) -> tuple[int, ...]:
        """A position, or a stride, by dimension."""
        found = []
        for weight in self.weights:
            digit, position = divmod(position, weight)
            found.append(digit)
        return tuple(found)

    def distance(self, digits: Sequence[int]) -> int:
        """Bytes of the parameter between position 0 and the position of these digits."""
        return sum(digit * stride for digit, (_, stride) in zip(digits, self.dims, strict=True))


def compose(source: ByteMap, copy: StridedCopy) -> Iterator[StridedCopy]:
    """A copy out of a tensor, `src` in its C order, as copies out of what that is a view of.

    What no single strided set describes there is cut: at the ends of the tensor's own consecutive
    bytes, and where a dimension does not fit into the tensor's.
    """
    if source.is_dense:
        yield replace(copy, src=source.offset + copy.src)
        return
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
    run = 1
    if moved[-1][1] == unit.src_bytes or copy.run == 1:
        *moved, (run, _, _) = moved
    src = source.offset + source.distance(at)
    yield replace(copy, src=src, dims=tuple(moved), run=run)


def compose_read(source: ByteMap, read: Read) -> Iterator[Read]:
    """`compose` for what is dense in a buffer, where it stays dense; `tensor` is kept as it is."""
    if source.is_dense:  # most are: without a detour by copies
        yield replace(read, offset=source.offset + read.offset)
        return
    for part in compose(source, read.as_copy()):
        yield Read.from_copy(part, read.tensor)


def shard_copies(
    source: ByteMap, starts: Sequence[int], copy: StridedCopy
) -> Iterator[tuple[int, StridedCopy]]:
    """A copy out of a tensor as copies out of the shards that make up its parameter, in any order:
    a shard's number, and a copy whose `src` counts in it. `starts`: of the shards, ascending.
    """
    for part in compose(source, copy):
        # The widest steps first: then a copy is cut once where a shard ends, not in every row.
        dims = tuple(sorted(part.dims, key=lambda dim: -dim[1]))
        for cut in split_copy(replace(part, dims=dims), starts):
            shard = bisect_right(starts, cut.src) - 1
            yield shard, replace(cut, src=cut.src - starts[shard])


def _cut(source: ByteMap, copy: StridedCopy) -> list[StridedCopy]:
    """A copy that carries from one of the tensor's dimensions into another, in smaller ones."""
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
    # A row: what the run's units can go through before another digit counts on.
    length = min((w for w in source.weights if w > unit.src_bytes), default=source.nbytes)
    start, stop = copy.src_bounds()
    ends = {-(-start // length) * length, stop // length * length}
    return list(split_copy(copy, sorted(ends)))


def _factored(source: ByteMap, offset: int, dims: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
    """The same dimensions with one split at the end of one of the tensor's; None if none can be."""
    for i, (count, src, dst) in enumerate(dims):
        for weight in source.weights[:-1]:
            if src and src < weight and weight % src == 0:
                inner = weight // src
                fits = offset % weight + (inner - 1) * src < weight
                if fits and count > inner and count % inner == 0:
                    split = ((count // inner, weight, inner * dst), (inner, src, dst))
                    return (*dims[:i], *split, *dims[i + 1 :])
    return None
