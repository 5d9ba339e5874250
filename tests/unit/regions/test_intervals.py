"""Interval arithmetic against sets of bytes."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_loader.common.regions.intervals import (
    contains,
    merge,
    merge_runs,
    num_bytes,
    subtract,
)

INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1])),
    max_size=8,
)


def as_set(intervals):
    return {byte for start, stop in intervals for byte in range(start, stop)}


@given(INTERVALS, INTERVALS)
def test_against_sets(left, right):
    merged = merge(left)
    assert as_set(merged) == as_set(left)
    assert all(a[1] < b[0] for a, b in pairwise(merged))
    assert as_set(subtract(merged, right)) == as_set(left) - as_set(right)
    assert num_bytes(merged) == len(as_set(left))
    for wanted in right:
        assert contains(merged, wanted) == (as_set([wanted]) <= as_set(left))


@given(st.lists(st.tuples(st.lists(st.integers(0, 40), max_size=6), st.integers(0, 5)), max_size=4))
def test_merge_runs_is_merge(groups):
    runs = [(np.array(starts, dtype=np.int64), length) for starts, length in groups]
    plain = [(s, s + length) for starts, length in groups for s in starts]
    assert merge_runs(runs) == merge(plain)
