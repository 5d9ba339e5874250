"""What a strided copy moves, unit by unit: the reference for regions and arrangements. And such
copies, and the views that they are made of, drawn at random.
"""

import math

import numpy as np
from hypothesis import strategies as st

from sglang_loader.common.regions.geometry import BYTES, Region, StridedCopy


def indices(offset, dims):
    """Every place of a strided set of `(count, stride)`, in order."""
    found = np.array([offset])
    for count, stride in dims:
        found = (found[:, None] + np.arange(count) * stride).ravel()
    return found


def moves(copy):
    """Every unit that the copy moves, by the definition of a strided copy: pairs of ((storage,
    first byte), (first byte in the bucket, unit)).
    """
    unit, dims = copy.unit, copy.dims
    src = indices(copy.src, [*((n, step) for n, step, _ in dims), (copy.run, unit.src_bytes)])
    dst = indices(copy.dst, [*((n, step) for n, _, step in dims), (copy.run, unit.dst_bytes)])
    pairs = zip(src.tolist(), dst.tolist(), strict=True)
    return [((copy.storage, to), (at, unit)) for at, to in pairs]


@st.composite
def strided_sets(draw, nbytes, step=1, shortest=1):
    """(offset, dims, run) of whole steps within `nbytes` bytes; strides may be anything, 0
    included.
    """
    room = nbytes // step
    run = draw(st.integers(shortest, room))
    room -= run
    dims = []
    for _ in range(draw(st.integers(0, 3))):
        count = draw(st.integers(1, 4))
        stride = draw(st.integers(0, room // max(count - 1, 1)))
        room -= (count - 1) * stride
        dims.append((count, stride * step))
    return draw(st.integers(0, room)) * step, tuple(dims), run * step


@st.composite
def copies_out_of(draw, nbytes, unit=BYTES, step=1):
    """A copy of some of `nbytes` bytes, in whole steps, to byte 0 of storage 0 and on, with gaps
    between, but to no byte twice.
    """
    offset, dims, run = draw(strided_sets(nbytes, step))
    run //= unit.src_bytes
    between, placed = run * unit.dst_bytes, []
    for count, stride in reversed(dims):
        between += draw(st.sampled_from([0, 2, 4, 8]))
        placed.insert(0, (count, stride, between))
        between *= count
    return StridedCopy(0, offset, 0, tuple(placed), run, unit)


@st.composite
def regions(draw):
    """A view of a dense array of 1 to 4 byte elements, and how many bytes that array has."""
    full = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    itemsize = draw(st.sampled_from([1, 2, 4]))
    strides = [math.prod(full[i + 1 :]) for i in range(len(full))]
    offset, shape = 0, []
    for count, stride in zip(full, strides, strict=True):
        start = draw(st.integers(0, count - 1))
        shape.append(draw(st.integers(1, count - start)))
        offset += start * stride
    order = draw(st.permutations(range(len(full))))
    region = Region(
        offset * itemsize,
        tuple(shape[i] for i in order),
        tuple(strides[i] for i in order),
        itemsize,
    )
    return region, full, itemsize
