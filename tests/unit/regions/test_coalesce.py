"""The coalescer against a byte-level reference: random copy sets, strides, interleavings, overlaps,
cuts.
"""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sglang_loader.common.regions.coalesce import coalesce, find_overlapping, join_adjacent
from sglang_loader.common.regions.geometry import BYTES, StridedCopy, Unit, split_copy
from unit.strided_moves import copies_out_of, moves

SPACE = 512


def ledger(copies):
    """Which source byte each destination byte gets, in order: later copies win."""
    return {place: src for copy in copies for place, (src, _) in moves(copy)}


@st.composite
def placed_copies(draw):
    copy = draw(copies_out_of(draw(st.sampled_from([4, 8, 24]))))
    src, dst = draw(st.integers(0, SPACE // 2)), draw(st.integers(0, SPACE // 2))
    return replace(copy, storage=draw(st.integers(0, 1)), src=src, dst=dst)


COPIES = st.lists(placed_copies(), min_size=1, max_size=12)
"""With any overlaps between them (none within one)."""


def num_units(copy):
    return copy.run * math.prod(count for count, _, _ in copy.dims)


@given(COPIES)
@settings(max_examples=300)
def test_copies_without_overlap_coalesce_exactly(copies):
    overlapping = find_overlapping(copies)
    rest = [c for i, c in enumerate(copies) if i not in overlapping]
    assert ledger(coalesce(rest)) == ledger(rest)


@given(COPIES)
@settings(max_examples=300)
def test_every_overlap_is_found(copies):
    overlapping = find_overlapping(copies)
    owner = {}
    for i, copy in enumerate(copies):
        for place, _ in moves(copy):
            first = owner.setdefault(place, i)
            if first != i:
                assert {first, i} <= overlapping


def test_casts_and_copies_are_never_joined():
    cast = Unit(4, 2, ("float32", "bfloat16"))
    copies = [StridedCopy(0, 0, 0, (), 4, cast), StridedCopy(0, 16, 8, (), 4, BYTES)]
    assert len(coalesce(copies)) == 2
    same = [StridedCopy(0, 0, 0, (), 4, cast), StridedCopy(0, 16, 8, (), 4, cast)]
    assert join_adjacent(same) == [StridedCopy(0, 0, 0, (), 8, cast)]


# Splitting at the pieces of a source.


@given(COPIES, st.lists(st.integers(1, SPACE), max_size=8, unique=True))
def test_a_split_copy_moves_the_same_bytes(copies, starts):
    starts = sorted([0, *starts])
    for copy in copies:
        parts = list(split_copy(copy, starts))
        assert sorted(ledger(parts).items()) == sorted(ledger([copy]).items())
        assert sum(map(num_units, parts)) == num_units(copy)
        for part in parts:
            first, stop = part.src_bounds()
            assert not any(first < start < stop for start in starts)


def test_regular_pieces_split_into_the_fewest_copies():
    rows = StridedCopy(0, 0, 0, ((64, 32, 64),), 16)
    assert len(list(split_copy(rows, [0]))) == 1
    assert [part.dims for part in split_copy(rows, [0, 32 * 16])] == [
        ((16, 32, 64),),
        ((48, 32, 64),),
    ]
    flat = StridedCopy(0, 0, 0, (), 1024)
    assert [part.run for part in split_copy(flat, [0, 256, 768])] == [256, 512, 256]
