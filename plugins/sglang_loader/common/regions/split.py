"""Splits a strided copy where its source changes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

from sglang_loader.common.regions.geometry import Dim, StridedCopy


def split_copy(copy: StridedCopy, starts: Sequence[int]) -> Iterator[StridedCopy]:
    """The same moves as copies that each read from one piece only; pure.

    Args:
        starts: where the source's pieces begin, ascending; each unit lies within one of them.
    """
    left = [copy]
    while left:
        part = left.pop()
        first, stop = part.src_bounds()
        i = bisect_right(starts, first)
        if i == len(starts) or stop <= starts[i]:
            yield part
        elif part.dims:
            left += reversed(_cut(part, starts[i] - first))
        else:
            yield from _cut_run(part, starts, i)


def _cut_run(copy: StridedCopy, starts: Sequence[int], i: int) -> Iterator[StridedCopy]:
    """A copy without dimensions, cut wherever a piece begins in it; the first of those is the
    `i`-th. There may be thousands.
    """
    unit, src, dst, run = copy.unit, copy.src, copy.dst, copy.run
    while run:
        room = (starts[i] - src) // unit.src_bytes if i < len(starts) else run
        size = min(room, run)
        yield StridedCopy(copy.storage, src, dst, (), size, unit)
        src, dst = src + size * unit.src_bytes, dst + size * unit.dst_bytes
        run, i = run - size, i + 1


def _cut(copy: StridedCopy, room: int) -> list[StridedCopy]:
    """The copy in two or more: one that reads fewer dimensions, or only the first `room` bytes."""
    (count, src_stride, dst_stride), *inner = copy.dims
    one = replace(copy, dims=tuple(inner))
    extent = one.src_bounds()[1] - copy.src
    fitting = (room - extent) // src_stride + 1 if src_stride and room >= extent else 0
    fitting = max(1, min(fitting, count))

    def take(number: int) -> tuple[Dim, ...]:
        return ((number, src_stride, dst_stride), *inner) if number > 1 else tuple(inner)

    parts = [replace(copy, dims=take(fitting))]
    if fitting < count:
        parts.append(
            replace(
                copy,
                src=copy.src + fitting * src_stride,
                dst=copy.dst + fitting * dst_stride,
                dims=take(count - fitting),
            )
        )
    return parts
