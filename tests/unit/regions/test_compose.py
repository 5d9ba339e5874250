"""Copies out of views, as copies out of the memory that they are views of."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_loader.common.regions.compose import ByteMap, compose
from sglang_loader.common.regions.geometry import BYTES, Unit
from unit.strided_moves import copies_out_of, indices, moves, regions


@given(regions(), st.booleans(), st.data())
def test_a_view_and_its_memory_copy_the_same(drawn, is_cast, data):
    """A view, with gaps and transposed, and a copy of some of its elements, which may be cast."""
    region, _, size = drawn
    view, unit = ByteMap.of(region), Unit(size, 8, ("narrow", "wide")) if is_cast else BYTES
    copy = data.draw(copies_out_of(view.nbytes, unit, step=size))
    place = indices(view.offset, view.dims)
    found = [move for part in compose(view, copy) for move in moves(part)]
    assert sorted(found) == sorted((to, (place[at], unit)) for to, (at, unit) in moves(copy))
