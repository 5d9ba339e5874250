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
    """Sorted, disjoint intervals of the same bytes: touching ones joined, empty ones dropped."""
    merged: list[Interval] = []
    for start, stop in sorted(i for i in intervals if i[0] < i[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def merge_runs(runs: Iterable[tuple[npt.NDArray[np.int64], int]]) -> list[Interval]:
    """`merge` of runs given as `(starts, length)` arrays: millions in well under a second."""
    pieces = [(starts, starts + length) for starts, length in runs if length and len(starts)]
    if not pieces:
        return []
    start = np.concatenate([piece[0] for piece in pieces])
    stop = np.concatenate([piece[1] for piece in pieces])
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(stop[order])
    first = np.flatnonzero(np.concatenate(([True], start[1:] > reach[:-1])))
    last = np.append(first[1:], len(start)) - 1
    return list(zip(start[first].tolist(), reach[last].tolist(), strict=True))


def contains(merged: Sequence[Interval], wanted: Interval) -> bool:
    """Whether `wanted` lies wholly inside the intervals of `merged` (the output of `merge`)."""
    if wanted[0] >= wanted[1]:
        return True
    at = bisect_right(merged, (wanted[0], 1 << 63)) - 1
    return at >= 0 and merged[at][0] <= wanted[0] and wanted[1] <= merged[at][1]


def meets(intervals: Iterable[Interval], wanted: Interval) -> bool:
    """Whether any byte of `wanted` is in one of `intervals`, in any order."""
    first, end = wanted
    return first < end and any(start < end and first < stop for start, stop in intervals)


def subtract(merged: Sequence[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """The bytes of `merged` that are in none of `removed`."""
    left: list[Interval] = []
    cuts = merge(removed)
    at = 0
    for start, stop in merged:
        while at < len(cuts) and cuts[at][1] <= start:
            at += 1
        here = at
        while here < len(cuts) and cuts[here][0] < stop:
            if start < cuts[here][0]:
                left.append((start, cuts[here][0]))
            start = max(start, cuts[here][1])
            here += 1
        if start < stop:
            left.append((start, stop))
    return left


def num_bytes(merged: Iterable[Interval]) -> int:
    """Bytes covered by disjoint intervals."""
    return sum(stop - start for start, stop in merged)
