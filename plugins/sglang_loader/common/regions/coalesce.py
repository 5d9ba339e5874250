"""Coalescing of copies: 18,867 weights of a 30 B MoE become some hundreds of strided copies.

Three steps, each exact:

1. Copies that continue each other on both sides are joined.
2. Copies of one shape whose offsets form an arithmetic progression become one copy with one more
   dimension. The progression may be interleaved (gate of expert e, up of expert e, gate of e + 1,
   ...): `MAX_PERIOD` lanes at most.
3. Step 2 once more, for progressions of progressions.

Copies are reordered, so no two of them may write the same byte. `find_overlapping` finds copies
that do, without memory for every byte of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TypeAlias

from msgspec.structs import replace

from sglang_loader.common.regions.geometry import Dim, StridedCopy, Unit, collapse
from sglang_loader.common.regions.intervals import merge_runs, num_bytes

MAX_PERIOD = 4
MIN_REPEATS = 3
MAX_DIMS = 4
MAX_EXPANDED_RUNS = 1 << 22

_Shape: TypeAlias = tuple[int, tuple[Dim, ...], int, Unit]

_DESTINATION = attrgetter("storage", "dst")
"""Sort key of copies."""


def coalesce(copies: Sequence[StridedCopy]) -> list[StridedCopy]:
    """Return fewer copies that move the same bytes to the same places.

    No two of `copies` may write the same byte (see `find_overlapping`). Their sources may overlap.
    """
    joined = join_adjacent(copies)
    # The first pass finds the rows of one expert, the second the experts of one layer.
    return fold_progressions(fold_progressions(joined))


def join_adjacent(copies: Sequence[StridedCopy]) -> list[StridedCopy]:
    """Join contiguous copies that continue each other on both sides.

    The result is ordered by destination.
    """
    joined: list[StridedCopy] = []
    for copy in sorted(copies, key=_DESTINATION):
        last = joined[-1] if joined else None
        if last is not None and _continues(last, copy):
            run = last.run + copy.run
            joined[-1] = StridedCopy(last.storage, last.src, last.dst, (), run, last.unit)
        else:
            joined.append(copy)
    return joined


def fold_progressions(copies: Sequence[StridedCopy]) -> list[StridedCopy]:
    """Fold copies of one shape at regular offsets into one copy with one more dimension."""
    by_shape: dict[_Shape, list[StridedCopy]] = {}
    for copy in sorted(copies, key=_DESTINATION):
        by_shape.setdefault((copy.storage, copy.dims, copy.run, copy.unit), []).append(copy)
    folded = [copy for alike in by_shape.values() for copy in _fold_alike(alike)]
    return sorted(folded, key=_DESTINATION)


def find_overlapping(copies: Sequence[StridedCopy]) -> set[int]:
    """Return the indices of copies whose destination bytes may overlap those of another copy.

    An interval sweep finds clusters of enclosing byte ranges. Inside a cluster of two or more
    copies, the runs are expanded and compared exactly. If two copies of a cluster overlap, all of
    its copies are returned. A cluster of more than `MAX_EXPANDED_RUNS` runs counts as overlapping.
    """
    overlapping: set[int] = set()
    for cluster in _clusters(copies):
        if len(cluster) > 1 and _really_overlap([copies[i] for i in cluster]):
            overlapping.update(cluster)
    return overlapping


def _continues(last: StridedCopy, copy: StridedCopy) -> bool:
    return (
        last.storage == copy.storage
        and last.unit == copy.unit
        and not last.dims
        and not copy.dims
        and last.src + last.run * last.unit.src_bytes == copy.src
        and last.dst + last.run * last.unit.dst_bytes == copy.dst
    )


def _fold_alike(copies: list[StridedCopy]) -> Iterator[StridedCopy]:
    """Yield the copies of one shape, folded greedily from the left.

    At each position the longest progression is folded, which may be interleaved.
    """
    if len(copies[0].dims) >= MAX_DIMS:
        yield from copies
        return
    at = 0
    while at < len(copies):
        period, repeats = _longest_progression(copies, at)
        for lane in range(at, at + period):
            first = copies[lane]
            yield _fold(first, copies[lane + period], repeats) if repeats > 1 else first
        at += period * repeats


def _longest_progression(copies: list[StridedCopy], at: int) -> tuple[int, int]:
    """Return the lanes and repeats of the longest progression from `at` on, (1, 1) without any."""
    progressions = [(1, 1)]
    for period in range(1, MAX_PERIOD + 1):
        repeats = _count_repeats(copies, at, period)
        # Two copies at any distance form a progression. Folding these would break up a longer one
        # that starts later, unless they are all copies of the shape.
        if repeats >= MIN_REPEATS or (period == 1 and repeats == len(copies)):
            progressions.append((period, repeats))
    return max(progressions, key=math.prod)


def _count_repeats(copies: list[StridedCopy], at: int, period: int) -> int:
    """Count how often `period` copies repeat from `at` on. Each lane may have its own strides."""
    stop = at + 2 * period
    if stop > len(copies):
        return 1
    strides = [_stride(copies, lane, period) for lane in range(at, at + period)]
    if any(src < 0 for src, _ in strides):  # torch has no negative strides
        return 1
    # Each further copy must continue its own lane.
    while stop < len(copies):
        if _stride(copies, stop - period, period) != strides[(stop - at) % period]:
            break
        stop += 1
    return (stop - at) // period


def _stride(copies: list[StridedCopy], at: int, period: int) -> tuple[int, int]:
    return copies[at + period].src - copies[at].src, copies[at + period].dst - copies[at].dst


def _fold(first: StridedCopy, second: StridedCopy, repeats: int) -> StridedCopy:
    outer = (repeats, second.src - first.src, second.dst - first.dst)
    dims, run = collapse((outer, *first.dims), first.run, first.unit)
    return replace(first, dims=dims, run=run)


def _clusters(copies: Sequence[StridedCopy]) -> list[list[int]]:
    """Return the indices of copies whose enclosing destination ranges form one connected range."""
    clusters: list[list[int]] = []
    ranges = [(copy.storage, *copy.dst_bounds()) for copy in copies]
    reach = -1, 0  # the storage, and the end of the last cluster in it
    for i in sorted(range(len(copies)), key=ranges.__getitem__):
        storage, start, stop = ranges[i]
        if (storage, start) >= reach:
            clusters.append([])
        clusters[-1].append(i)
        reach = max(reach, (storage, stop))
    return clusters


def _really_overlap(copies: Sequence[StridedCopy]) -> bool:
    if sum(copy.num_dst_runs() for copy in copies) > MAX_EXPANDED_RUNS:
        return True
    runs = [copy.dst_runs() for copy in copies]
    # Bytes that two copies write count once in the merged runs.
    return num_bytes(merge_runs(runs)) < sum(len(starts) * length for starts, length in runs)
