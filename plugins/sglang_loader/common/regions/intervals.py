"""Byte ranges as sorted, disjoint lists of `(start, stop)`.

written = merge([(0, 4), (4, 8), (16, 32)])     # [(0, 8), (16, 32)]
contains(written, (2, 6))                       # True
subtract(written, [(6, 20)])                    # [(0, 6), (20, 32)]
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Interval: TypeAlias = tuple[int, int]
"""Half-open byte range (start, stop)."""


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals into sorted, disjoint ones of the same bytes.

    Touching intervals are joined, empty ones are dropped.
    """
    merged: list[Interval] = []
    for start, stop in sorted(i for i in intervals if i[0] < i[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def merge_runs(runs: Iterable[tuple[npt.NDArray[np.int64], int]]) -> list[Interval]:
    """Merge runs given as `(starts, length)` arrays: millions in well under a second."""
    ends = [(starts, starts + length) for starts, length in runs if length and len(starts)]
    if not ends:
        return []
    start = np.concatenate([starts for starts, _ in ends])
    stop = np.concatenate([stops for _, stops in ends])
    # An interval begins where a start lies beyond all stops of the runs before it.
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(stop[order])
    first = np.flatnonzero(np.concatenate(([True], start[1:] > reach[:-1])))
    last = np.append(first[1:], len(start)) - 1
    return list(zip(start[first].tolist(), reach[last].tolist(), strict=True))


def contains(merged: Sequence[Interval], interval: Interval) -> bool:
    """Return True if `interval` lies inside one interval of `merged` (a result of `merge`)."""
    start, stop = interval
    if start >= stop:
        return True
    at = bisect_right(merged, (start, 1 << 63)) - 1
    return at >= 0 and merged[at][0] <= start and stop <= merged[at][1]


def meets(intervals: Iterable[Interval], interval: Interval) -> bool:
    """Return True if any byte of `interval` is in one of `intervals`, which may have any order."""
    first, end = interval
    return first < end and any(start < end and first < stop for start, stop in intervals)


def subtract(merged: Sequence[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """Return the bytes of `merged` that are in none of `removed`."""
    if not merged:  # as at most ends of syncs, where `removed` has hundreds of ranges to sort
        return []
    left: list[Interval] = []
    cuts = merge(removed)
    at = 0  # the first cut that may still meet this interval
    for start, stop in merged:
        while at < len(cuts) and cuts[at][1] <= start:
            at += 1
        i = at
        while i < len(cuts) and cuts[i][0] < stop:
            if start < cuts[i][0]:
                left.append((start, cuts[i][0]))
            start = max(start, cuts[i][1])
            i += 1
        if start < stop:
            left.append((start, stop))
    return left


def num_bytes(merged: Iterable[Interval]) -> int:
    """Count the bytes of disjoint intervals."""
    return sum(stop - start for start, stop in merged)
