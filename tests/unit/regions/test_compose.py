"""Copies out of views, as copies out of the memory that they are views of."""

import math
from itertools import accumulate

from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_loader.common.regions.compose import ByteMap, compose
from sglang_loader.common.regions.geometry import BYTES, Region, StridedCopy, Unit
from unit.strided_moves import indices, moves


@st.composite
def cases(draw):
    """A view, with gaps and transposed, and a copy of some of its elements, which may be cast."""
    size, shape = draw(st.sampled_from([1, 2, 4])), draw(st.lists(st.integers(1, 4), min_size=1))
    assume(math.prod(shape) <= 64)
    steps = accumulate((n + draw(st.integers(0, 1)) for n in shape), int.__mul__, initial=1)
    dims = draw(st.permutations(list(zip(shape, steps, strict=False))))
    view = ByteMap.of(Region(16, *map(tuple, zip(*dims, strict=True)), size))
    unit = Unit(size, 8, ("narrow", "wide")) if draw(st.booleans()) else BYTES
    first = draw(st.integers(0, view.nbytes // size - 1))
    run = draw(st.integers(1, view.nbytes // size - first))
    count = draw(st.integers(1, 3))
    step = draw(st.integers(0, (view.nbytes // size - first - run) // max(1, count - 1)))
    rows = ((count, step * size, run * 8),)
    return view, StridedCopy(0, first * size, 0, rows, run * size // unit.src_bytes, unit)


@given(cases())
def test_the_same_is_moved_out_of_the_memory_behind_a_view(case):
    view, copy = case
    place = indices(view.offset, view.dims)
    found = [move for part in compose(view, copy) for move in moves(part)]
    assert sorted(found) == sorted((to, (place[at], unit)) for to, (at, unit) in moves(copy))
