"""Strided copies as plain numbers: the parts of a load plan before it touches a tensor.

A `StridedCopy` moves bytes from one bucket (a flat byte buffer) into one destination storage. A
copy is the product of `dims`, outermost first, each `(count, source stride, destination stride)` in
bytes, around one innermost `run` of consecutive units. A unit is one byte for a copy that keeps the
dtype, and one element for a copy that casts.

    copy = describe_copy(0, Region(0, (4, 8), (8, 1), 2), Region(64, (4, 8), (16, 1), 2), BYTES)
    copy.dims, copy.run      # ((4, 16, 32),), 16

Pure: numbers in, numbers out. `numpy` expands many runs at once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Dim: TypeAlias = tuple[int, int, int]
"""`(count, source stride in bytes, destination stride in bytes)`."""

Runs: TypeAlias = tuple[npt.NDArray[np.int64], int]
"""The starts (ascending) and the length, in bytes, of runs of consecutive bytes."""


class Unit(msgspec.Struct, frozen=True):
    """One step of the innermost run: bytes that are moved, or elements that are converted.

    Attributes:
        src_bytes: size of the unit in the source.
        dst_bytes: size of the unit in the destination.
        cast: `(source dtype, destination dtype)` as any hashable values, or None without a
            conversion.
    """

    src_bytes: int = 1
    dst_bytes: int = 1
    cast: tuple[object, object] | None = None


BYTES = Unit()


@dataclass(frozen=True, slots=True)
class Region:
    """A strided tensor region: offset in bytes, shape, strides in elements, bytes per element."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    def bounds(self) -> tuple[int, int]:
        """Return the byte range [start, stop) that encloses the region. Empty if the region is."""
        if 0 in self.shape:
            return self.offset, self.offset
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return self.offset, self.offset + (last + 1) * self.itemsize

    def runs(self) -> Runs:
        """Return the runs of the region's bytes. An empty region has none."""
        if 0 in self.shape:
            return np.empty(0, dtype=np.int64), 0
        strides = [stride * self.itemsize for stride in self.stride]
        return _expanded(self.offset, *_one_side(self.shape, strides, self.itemsize))


# A struct of msgspec, because plans of 1 T parameters make hundreds of thousands, and a dataclass
# takes ten times as long.
class StridedCopy(msgspec.Struct, frozen=True, gc=False):
    """One copy out of a bucket, between byte offsets. `storage` is the destination's index."""

    storage: int
    src: int
    dst: int
    dims: tuple[Dim, ...]
    run: int
    unit: Unit = BYTES

    def dst_bounds(self) -> tuple[int, int]:
        """Return the byte range [start, stop) of the destination storage that encloses the copy."""
        stop = self.dst + self.run * self.unit.dst_bytes
        for count, _, dst_stride in self.dims:
            stop += (count - 1) * dst_stride
        return self.dst, stop

    def src_bounds(self) -> tuple[int, int]:
        """Return the byte range [start, stop) of the bucket that encloses the bytes read."""
        stop = self.src + self.run * self.unit.src_bytes
        for count, src_stride, _ in self.dims:
            stop += (count - 1) * src_stride
        return self.src, stop

    def dst_runs(self) -> Runs:
        """Return the runs that the copy writes in the destination."""
        return _expanded(self.dst, *self._dst_side())

    def num_dst_runs(self) -> int:
        """Count the runs that `dst_runs` would return, without making them."""
        return math.prod(count for count, _, _ in self._dst_side()[0])

    def _dst_side(self) -> tuple[tuple[Dim, ...], int]:
        counts, strides = [dim[0] for dim in self.dims], [dim[2] for dim in self.dims]
        return _one_side(counts, strides, self.run * self.unit.dst_bytes)


def collapse(dims: Iterable[Dim], run: int, unit: Unit) -> tuple[tuple[Dim, ...], int]:
    """Return the same set of moves with as few dimensions as possible, widest run innermost."""
    # Ordered by destination stride: a copy may run in any order if it writes no byte twice.
    ordered = sorted((d for d in dims if d[0] != 1), key=itemgetter(2, 1), reverse=True)
    # Innermost dimensions that continue the run on both sides become a part of the run.
    while ordered and ordered[-1][1:] == (run * unit.src_bytes, run * unit.dst_bytes):
        run *= ordered.pop()[0]
    # A dimension that continues the next inner one on both sides is merged with it.
    merged: list[Dim] = []
    for count, src_stride, dst_stride in ordered:
        if merged and merged[-1][1:] == (count * src_stride, count * dst_stride):
            merged[-1] = (merged[-1][0] * count, src_stride, dst_stride)
        else:
            merged.append((count, src_stride, dst_stride))
    return tuple(merged), run


def broadcast_to(region: Region, shape: Sequence[int]) -> Region:
    """Expand `region` to `shape` by numpy's rules (stride 0 along stretched dimensions)."""
    lead = len(shape) - len(region.shape)
    stride = [0] * lead
    for have, step, want in zip(region.shape, region.stride, shape[lead:], strict=True):
        if have != want and have != 1:
            raise ValueError(f"cannot broadcast {region.shape} to {tuple(shape)}")
        stride.append(step if have == want else 0)
    return Region(region.offset, tuple(shape), tuple(stride), region.itemsize)


def describe_copy(storage: int, src: Region, dst: Region, unit: Unit) -> StridedCopy:
    """Describe the copy `dst[...] = src` (with broadcasting) as one copy with collapsed dimensions.

    The regions must not be empty. `unit` is `BYTES` if both sides have one dtype.
    """
    if 0 in dst.shape:
        raise ValueError(f"an empty region cannot be described as a copy: shape {dst.shape}")
    src = broadcast_to(src, dst.shape)
    run = dst.itemsize if unit.cast is None else 1
    strides = zip(dst.shape, src.stride, dst.stride, strict=True)
    steps = [(n, s * src.itemsize, d * dst.itemsize) for n, s, d in strides]
    dims, run = collapse(steps, run, unit)
    return StridedCopy(storage, src.offset, dst.offset, dims, run, unit)


def _one_side(
    counts: Iterable[int], strides: Iterable[int], run: int
) -> tuple[tuple[Dim, ...], int]:
    """Collapse one side of a copy. `strides` and `run` are in bytes. Dense bytes are one run."""
    return collapse(((n, s, s) for n, s in zip(counts, strides, strict=True)), run, BYTES)


def _expanded(start: int, dims: Iterable[Dim], run: int) -> Runs:
    starts = np.array([start], dtype=np.int64)
    for count, stride, _ in dims:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    starts.sort()
    return starts, run


def split_copy(copy: StridedCopy, starts: Sequence[int]) -> Iterator[StridedCopy]:
    """Yield the same moves as copies that each read from one part of the source only.

    Parts begin at `starts`, ascending, and no unit crosses a start.
    """
    left = [copy]
    while left:
        part = left.pop()
        first, stop = part.src_bounds()
        i = bisect_right(starts, first)
        if i == len(starts) or stop <= starts[i]:
            yield part
        elif part.dims:
            left += reversed(_cut(part, starts[i] - first, stop - first))
        else:
            yield from _cut_run(part, starts, i)


def _cut_run(copy: StridedCopy, starts: Sequence[int], i: int) -> Iterator[StridedCopy]:
    """Cut a copy without dimensions at the starts from the `i`-th on. There may be thousands."""
    unit, src, dst, run = copy.unit, copy.src, copy.dst, copy.run
    while run:
        room = (starts[i] - src) // unit.src_bytes if i < len(starts) else run
        size = min(room, run)
        yield StridedCopy(copy.storage, src, dst, (), size, unit)
        src, dst = src + size * unit.src_bytes, dst + size * unit.dst_bytes
        run, i = run - size, i + 1


def _cut(copy: StridedCopy, room: int, extent: int) -> list[StridedCopy]:
    """Cut along the outermost dimension: first a part of up to `room` bytes, or one step.

    Args:
        extent: the bytes from the first to the last that the copy reads.
    """
    # As many steps as end within `room`, but at least one. A single step may still be too long.
    count, src_stride, _ = copy.dims[0]
    extent -= (count - 1) * src_stride  # of one step
    fitting = (room - extent) // src_stride + 1 if src_stride and room >= extent else 0
    fitting = max(1, min(fitting, count))
    head = _steps(copy, 0, fitting)
    return [head] if fitting == count else [head, _steps(copy, fitting, count - fitting)]


def _steps(copy: StridedCopy, first: int, number: int) -> StridedCopy:
    """Return some steps of a copy's outermost dimension."""
    _, src_stride, dst_stride = copy.dims[0]
    dims = copy.dims[1:]
    if number > 1:
        dims = ((number, src_stride, dst_stride), *dims)
    src, dst = copy.src + first * src_stride, copy.dst + first * dst_stride
    return StridedCopy(copy.storage, src, dst, dims, copy.run, copy.unit)
