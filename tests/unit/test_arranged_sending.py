"""What travels about arrangements, and what a trainer learns of it."""

import logging
from dataclasses import asdict

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_loader.common.layout import (
    BucketLayout,
    WireError,
    decode_arrangements,
    digest_of,
    encode_arrangements,
)
from sglang_loader.common.regions.arrangement import Read
from verl_sglang_sync.engine.arrangements import (
    NO_ARRANGEMENTS,
    EngineArrangements,
)
from verl_sglang_sync.sources.bucket_cutter import Bucket

LAYOUT = BucketLayout.pack([("a", (16, 8), torch.float32), ("b", (8,), torch.bfloat16)])
READS = (Read(0, 64, ((4, 64),), 32, 0), Read(1, 0, (), 16, 128))
BUCKETS = [Bucket.of(BucketLayout.pack([(n, (256,), torch.uint8)]), is_last=False) for n in "abc"]
HALF = (Read(0, 128, (), 128, 0),)


def encoded(*reads, layout="d"):
    return encode_arrangements(((layout, reads),))


@given(st.lists(st.sampled_from([None, HALF, READS]), max_size=4))
def test_arrangements_round_trip(arrangements):
    buckets = tuple((f"d{i}", arrangement) for i, arrangement in enumerate(arrangements))
    layouts = {digest: LAYOUT for digest, _ in buckets}
    assert decode_arrangements(encode_arrangements(buckets), layouts) == buckets


BAD = {
    "noise": (b"noise", "not arrangements"),
    "more fields": (
        msgspec.msgpack.encode([["d", [{**asdict(READS[1]), "more": 1}]]]),
        "not arrangements: an unknown field",
    ),
    "nested too deep": (
        msgspec.msgpack.encode([["d", [{**asdict(READS[1]), "more": 1}]]])[:-1]
        + b"\x91" * 5000
        + b"\xc0",
        "not arrangements: maximum recursion depth",
    ),
    "unknown layout": (encoded(*READS, layout="e"), "was not sent: e"),
    "unknown tensor": (encoded(Read(2, 0, (), 8, 0)), "tensor 2 of 2"),
    "negative tensor": (encoded(Read(-1, 0, (), 8, 0)), r"Expected `int` >= 0 .*\.tensor"),
    "negative offset": (encoded(Read(0, -8, (), 8, 0)), r"Expected `int` >= [01] .*\.offset"),
    "negative start": (encoded(Read(0, 0, (), 8, -8)), r"Expected `int` >= [01] .*\.start"),
    "negative stride": (encoded(Read(0, 64, ((2, -8),), 8, 0)), r"Expected `int` >= [01] .*\.dims"),
    "no run": (encoded(Read(0, 0, (), 0, 0)), r"Expected `int` >= [01] .*\.run"),
    "no count": (encoded(Read(0, 0, ((0, 8),), 8, 0)), r"Expected `int` >= [01] .*\.dims"),
    "past the tensor": (encoded(Read(1, 8, (), 9, 0)), "'b': a read up to byte 17 of 16"),
    "strided past it": (encoded(Read(0, 0, ((5, 128),), 8, 0)), "'a': a read up to byte 520"),
    "past the bucket": (encoded(Read(0, 0, (), 8, 761)), "to byte 769 of no more than"),
}


@pytest.mark.parametrize("case", BAD)
def test_arrangements_that_leave_their_bounds_are_refused(case):
    data, message = BAD[case]
    with pytest.raises(WireError, match=message):
        decode_arrangements(data, {"d": LAYOUT})
    assert decode_arrangements(encoded(*READS), {"d": LAYOUT})


def test_a_trainer_learns_what_it_may_use(caplog):
    assert EngineArrangements(is_wanted=False).held_digest is None
    arrangements = EngineArrangements(is_wanted=True)
    assert arrangements.held_digest == ""
    offer = encode_arrangements(tuple((bucket.digest, HALF) for bucket in BUCKETS))
    arrangements.learn(offer, BUCKETS)
    assert arrangements.held_digest == digest_of(offer)
    assert arrangements.matching(BUCKETS).digest == digest_of(offer)
    assert arrangements.matching(BUCKETS[1:]) == NO_ARRANGEMENTS
    some = zip(BUCKETS, [HALF, (), None], strict=True)
    arrangements.learn(encode_arrangements(tuple((b.digest, reads) for b, reads in some)), BUCKETS)
    known = arrangements.matching(BUCKETS)
    assert [known.expected(i, READS) for i in range(4)] == [HALF, (), READS, READS]
    assert [known.is_arranged(i) for i in range(4)] == [True, True, False, False]
    arrangements.forget()
    assert arrangements.held_digest == ""
    arrangements.learn(offer, BUCKETS)
    with caplog.at_level(logging.WARNING):
        arrangements.learn(b"noise", BUCKETS)
    assert "its arrangements do not fit them: not arrangements" in caplog.text
    assert arrangements.held_digest is None, "asked for them no more"
    assert arrangements.matching(BUCKETS) == NO_ARRANGEMENTS
