"""A layout on the wire: round trip, and what is refused."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_loader.common.layout import (
    BucketLayout,
    WireError,
    decode_layout,
    encode_layout,
)

DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn)


def layouts():
    tensor = st.tuples(
        st.text(min_size=1, max_size=8),
        st.lists(st.integers(0, 5), max_size=3),
        st.sampled_from(DTYPES),
    )
    return st.lists(tensor, max_size=6).map(BucketLayout.pack)


@given(layouts())
def test_layouts_round_trip(layout):
    assert decode_layout(encode_layout(layout)) == layout


def encoded_layout(**changes):
    tensor = {"name": "t", "shape": [4], "dtype": "float32", "offset": 0} | changes
    return msgspec.msgpack.encode({"tensors": [tensor], "nbytes": 256})


BAD = {
    "noise": (b"noise", "not a bucket layout"),
    "a dtype that torch does not have": (
        encoded_layout(dtype="float31"),
        r"unknown dtype 'float31' - at `\$.tensors\[0\].dtype",
    ),
    "a dtype that is none": (encoded_layout(dtype="nn"), "unknown dtype 'nn'"),
    "a negative dimension": (encoded_layout(shape=(-4,)), r"'t': shape \(-4,\)"),
    "one of two": (encoded_layout(shape=(4, -1)), r"'t': shape \(4, -1\)"),
    "beyond the bucket": (encoded_layout(shape=(65,)), "ends? within the bucket's 256 bytes"),
    "far beyond it": (encoded_layout(shape=(1 << 62, 4)), "end within the bucket's 256 bytes"),
    "not all within": (encoded_layout(offset=244), "end within the bucket's 256 bytes"),
    "before the bucket": (encoded_layout(offset=-4), "overlaps its neighbour"),
    "not aligned": (encoded_layout(offset=2), "must be a multiple of 4"),
    "two at one place": (
        encode_layout(BucketLayout.pack([(name, (8,), torch.int8) for name in "ab"])).replace(
            b"offset\xcd\x01\x00", b"offset\x07"
        ),
        "'b' at byte 7 overlaps its neighbour",
    ),
    "a field too many": (
        msgspec.msgpack.encode({"tensors": [], "nbytes": 0, "more": 1}),
        "an unknown field, or not encoded as we do",
    ),
    "no size": (msgspec.msgpack.encode({"tensors": []}), "missing required field `nbytes`"),
}


@pytest.mark.parametrize(("encoded", "message"), BAD.values(), ids=BAD)
def test_an_impossible_layout_is_refused(encoded, message):
    decode_layout(encoded_layout())
    with pytest.raises(WireError, match=message):
        decode_layout(encoded)
