"""Strided copies against numpy: the same bytes move, whatever the description was collapsed to."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_loader.common.regions.geometry import (
    BYTES,
    Region,
    Unit,
    broadcast_to,
    describe_copy,
)
from unit.strided_moves import moves

ITEMSIZES = st.sampled_from([1, 2, 4, 8])


def numpy_view(region, data):
    """`region` as a numpy view of bytes, with the element's bytes as the last dimension."""
    return np.lib.stride_tricks.as_strided(
        data[region.offset :],
        (*region.shape, region.itemsize),
        (*(s * region.itemsize for s in region.stride), 1),
    )


@st.composite
def region_pairs(draw):
    """A source (broadcast, sliced, permuted) and a destination without internal overlap."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=4)))
    itemsize = draw(ITEMSIZES)

    def dense(padding):
        strides = [0] * len(shape)
        step = 1
        for axis in draw(st.permutations(range(len(shape)))):
            strides[axis] = step
            step *= shape[axis] + draw(padding)
        return tuple(strides)

    dst = Region(draw(st.integers(0, 8)) * itemsize, shape, dense(st.integers(0, 2)), itemsize)
    src_strides = list(dense(st.integers(0, 2)))
    for axis in range(len(shape)):
        if draw(st.integers(0, 5)) == 0:
            src_strides[axis] = 0
    src = Region(draw(st.integers(0, 8)) * itemsize, shape, tuple(src_strides), itemsize)
    return src, dst


@given(region_pairs())
def test_describe_copy_equals_a_tensor_copy(pair):
    src_region, dst_region = pair
    src = np.random.default_rng(0).integers(0, 256, src_region.bounds()[1] + 16, dtype=np.uint8)
    want = np.zeros(dst_region.bounds()[1] + 16, dtype=np.uint8)
    got = want.copy()
    numpy_view(dst_region, want)[...] = numpy_view(src_region, src)
    copy = describe_copy(0, src_region, dst_region, BYTES)
    for (_, at), (origin, _) in moves(copy):
        got[at] = src[origin]
    np.testing.assert_array_equal(got, want)
    assert (
        copy.run * math.prod(count for count, _, _ in copy.dims)
        == math.prod(dst_region.shape) * dst_region.itemsize
    )


@given(region_pairs())
def test_bounds_and_runs_enclose_exactly_what_is_written(pair):
    src_region, dst_region = pair
    touched = np.zeros(dst_region.bounds()[1], dtype=bool)
    numpy_view(dst_region, touched)[...] = True
    copy = describe_copy(0, src_region, dst_region, BYTES)
    for starts, length in (copy.dst_runs(), dst_region.runs()):
        rebuilt = np.zeros_like(touched)
        for start in starts:
            assert not rebuilt[start : start + length].any()
            rebuilt[start : start + length] = True
        np.testing.assert_array_equal(rebuilt, touched)
    assert copy.num_dst_runs() == len(copy.dst_runs()[0])
    where = np.flatnonzero(touched)
    assert copy.dst_bounds() == (where[0], where[-1] + 1) == dst_region.bounds()
    assert copy.src_bounds() == src_region.bounds()


def test_a_cast_counts_elements():
    unit = Unit(4, 2, ("float32", "bfloat16"))
    copy = describe_copy(0, Region(0, (3, 8), (8, 1), 4), Region(0, (3, 8), (8, 1), 2), unit)
    assert (copy.dims, copy.run) == ((), 24)
    assert copy.src_bounds() == (0, 96)
    assert copy.dst_bounds() == (0, 48)


def test_broadcast_rejects_shapes_that_do_not_fit():
    assert broadcast_to(Region(0, (1,), (1,), 2), (4, 3)).stride == (0, 0)
    with pytest.raises(ValueError, match="cannot broadcast"):
        broadcast_to(Region(0, (2,), (1,), 2), (4, 3))


def test_an_empty_region_is_no_copy():
    empty = Region(8, (0, 3), (3, 1), 2)
    assert empty.bounds() == (8, 8)
    assert len(empty.runs()[0]) == 0
    with pytest.raises(ValueError, match="empty"):
        describe_copy(0, empty, empty, BYTES)
