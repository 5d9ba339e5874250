"""Which bytes of a tensor some bytes of a view of it are.

A trainer's export gathers parameters and hands on views and copies of them: an expert of a fused
weight, a tied embedding. `ByteMap` says which bytes of its parameter such a tensor is; `compose`
says which bytes of the parameter a strided set of the tensor's bytes is:

    expert = ByteMap.of(Region(4096, (8, 16), (32, 1), 2))
    for read in compose(expert, Read(7, 32, (), 32, 0)): ...
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from sglang_loader.common.regions.arrangement import Read
from sglang_loader.common.regions.geometry import Region

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


def compose(source: ByteMap, read: Read) -> Iterator[Read]:
    """A read of a tensor as reads of what the tensor is a view of: in the same order, without gaps.

    What no single strided set describes there is cut: at the ends of the tensor's own consecutive
    bytes, and where a dimension does not fit into the tensor's.

    Args:
        source: the tensor.
        read: `offset` counts in the tensor's C order; `tensor` is kept as it is.
    """
    if source.is_dense:
        yield Read(read.tensor, source.offset + read.offset, read.dims, read.run, read.start)
        return
    at = source.digits(read.offset)
    steps = [source.digits(stride) for _, stride in (*read.dims, (read.run, 1))]
    counts = [*(count for count, _ in read.dims), read.run]
    reach = [
        digit + sum((n - 1) * step[k] for n, step in zip(counts, steps, strict=True))
        for k, digit in enumerate(at)
    ]
    if any(top >= count for top, (count, _) in zip(reach, source.dims, strict=True)):
        for part in _cut(source, read):
            yield from compose(source, part)
        return
    first = source.offset + source.distance(at)
    dims = [(n, source.distance(step)) for n, step in zip(counts, steps, strict=True)]
    run = 1
    if dims[-1][1] == 1 or read.run == 1:
        *dims, (run, _) = dims
    yield Read(read.tensor, first, tuple(dims), run, read.start)


def _cut(source: ByteMap, read: Read) -> list[Read]:
    """A read that carries from one of the tensor's dimensions into another, in smaller ones."""
    factored = _factored(source, read.offset, (*read.dims, (read.run, 1)))
    if factored is not None:
        *outer, (run, _) = factored
        return [replace(read, dims=tuple(outer), run=run)]
    if read.dims:
        (count, stride), *inner = read.dims
        row = replace(read, dims=tuple(inner))
        return [
            replace(row, offset=read.offset + i * stride, start=read.start + i * row.nbytes)
            for i in range(count)
        ]
    row_nbytes = source.dims[-1][0]
    head = min(read.run, -read.offset % row_nbytes or row_nbytes)
    if head == row_nbytes and read.run > row_nbytes:
        head = read.run - read.run % row_nbytes
    rest = replace(read, offset=read.offset + head, run=read.run - head, start=read.start + head)
    return [replace(read, run=head), *([rest] if rest.run else [])]


def _factored(source: ByteMap, offset: int, dims: Dims) -> Dims | None:
    """The same dimensions with one split at the end of one of the tensor's; None if none can be."""
    for i, (count, stride) in enumerate(dims):
        for weight in source.weights[:-1]:
            if stride and stride < weight and weight % stride == 0:
                inner = weight // stride
                fits = offset % weight + (inner - 1) * stride < weight
                if fits and count > inner and count % inner == 0:
                    return (*dims[:i], (count // inner, weight), (inner, stride), *dims[i + 1 :])
    return None
