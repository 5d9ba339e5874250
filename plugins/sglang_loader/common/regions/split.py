"""Splits a strided copy where its source changes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

from sglang_loader.common.regions.geometry import Dim, StridedCopy


def split_copy(copy: StridedCopy, starts: Sequence[int]) -> Iterator[StridedCopy]:
    """The same moves as copies that each read from one piece only; pure.

    Args:
        copy: any copy.
        starts: where the source's pieces begin, ascending; each unit lies within one of them.
    """
    left = [copy]
    while left:
        part = left.pop()
        first, stop = part.src_bounds()
        i = bisect_right(starts, first)
        if i == len(starts) or stop <= starts[i]:
            yield part
        else:
            left += reversed(_cut(part, starts[i] - first))


def _cut(copy: StridedCopy, room: int) -> list[StridedCopy]:
    """The copy in two or more: one that reads fewer dimensions, or only the first `room` bytes."""
    if not copy.dims:
        head = room // copy.unit.src_bytes
        tail = _moved(copy, room, head * copy.unit.dst_bytes)
        return [replace(copy, run=head), replace(tail, run=copy.run - head)]
    (count, src_stride, dst_stride), *inner = copy.dims
    one = replace(copy, dims=tuple(inner))
    extent = one.src_bounds()[1] - copy.src
    fitting = (room - extent) // src_stride + 1 if src_stride and room >= extent else 0
    fitting = max(1, min(fitting, count))

    def take(number: int) -> tuple[Dim, ...]:
        return ((number, src_stride, dst_stride), *inner) if number > 1 else tuple(inner)

    parts = [replace(copy, dims=take(fitting))]
    if fitting < count:
        rest = _moved(copy, fitting * src_stride, fitting * dst_stride)
        parts.append(replace(rest, dims=take(count - fitting)))
    return parts


def _moved(copy: StridedCopy, src: int, dst: int) -> StridedCopy:
    return replace(copy, src=copy.src + src, dst=copy.dst + dst)
