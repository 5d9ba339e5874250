"""Which bytes of a tensor some bytes of a view of it are.

A trainer's export gathers parameters and hands on views and copies of them: an expert of a fused
weight, a tied embedding. `ByteMap` says which bytes of its parameter such a tensor is; `compose`
says which bytes of the parameter a strided set of the tensor's bytes is:

    expert = ByteMap.of(Region(4096, (8, 16), (32, 1), 2))
    for part in compose(expert, offset=32, dims=(), run=32): ...
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

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


@dataclass(frozen=True, slots=True)
class Part:
    """Some bytes of a parameter.

    Attributes:
        offset: first byte, in the parameter.
        dims: around the run.
        run: consecutive bytes innermost.
        start: how many bytes of the composed set come before it.
    """

    offset: int
    dims: Dims
    run: int
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.run * math.prod(count for count, _ in self.dims)


def compose(source: ByteMap, offset: int, dims: Dims, run: int, start: int = 0) -> Iterator[Part]:
    """A strided set of a tensor's bytes, in the parameter: in the same order, without gaps.

    A set that no single strided set describes there is cut: at the ends of the tensor's own
    consecutive bytes, and where a dimension does not fit into the tensor's.

    Args:
        source: the tensor.
        offset: first byte, in the tensor's C order.
        dims: around the run.
        run: consecutive bytes innermost.
        start: position of the first part.
    """
    if source.is_dense:
        yield Part(source.offset + offset, dims, run, start)
        return
    at = source.digits(offset)
    steps = [source.digits(stride) for _, stride in (*dims, (run, 1))]
    counts = [*(count for count, _ in dims), run]
    reach = [
        digit + sum((n - 1) * step[k] for n, step in zip(counts, steps, strict=True))
        for k, digit in enumerate(at)
    ]
    if all(top < count for top, (count, _) in zip(reach, source.dims, strict=True)):
        first = source.offset + source.distance(at)
        strides = [source.distance(step) for step in steps]
        if strides[-1] == 1 or run == 1:
            yield Part(first, tuple(zip(counts[:-1], strides, strict=False)), run, start)
        else:
            yield Part(first, tuple(zip(counts, strides, strict=True)), 1, start)
        return
    yield from _cut(source, offset, dims, run, start)


def _cut(source: ByteMap, offset: int, dims: Dims, run: int, start: int) -> Iterator[Part]:
    """`compose` for a set that carries from one of the tensor's dimensions into another."""
    factored = _factored(source, offset, (*dims, (run, 1)))
    if factored is not None:
        *outer, (run, _) = factored
        yield from compose(source, offset, tuple(outer), run, start)
        return
    if dims:
        (count, stride), *inner = dims
        nbytes = run * math.prod(n for n, _ in inner)
        for i in range(count):
            yield from compose(source, offset + i * stride, tuple(inner), run, start + i * nbytes)
        return
    row = source.dims[-1][0]
    head = min(run, -offset % row or row)
    if head == row and run > row:
        head = run - run % row
    yield from compose(source, offset, (), head, start)
    if run > head:
        yield from compose(source, offset + head, (), run - head, start + head)


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
