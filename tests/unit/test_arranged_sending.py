"""What travels about arrangements, and which buckets of a sync are packed by them."""

from __future__ import annotations

import logging

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
from sglang_loader.common.regions.arrangement import Arrangement, Read
from verl_sglang_sync.engine.arrangements import (
    NOTHING_KNOWN,
    ArrangedSync,
    EngineArrangements,
    KnownArrangements,
)
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.sources.bucket_stream import Bucket, BucketStream

CPU = torch.device("cpu")
LAYOUT = BucketLayout.pack([("a", (16, 8), torch.float32), ("b", (8,), torch.bfloat16)])
READS = (Read(0, 64, ((4, 64),), 32, 0), Read(1, 0, (), 16, 128))
BUCKETS = [Bucket.of(BucketLayout.pack([(n, (256,), torch.uint8)]), is_last=False) for n in "abc"]
HALF = Arrangement((Read(0, 128, (), 128, 0),), 256)


def encoded(*reads: Read, nbytes: int = 256, layout: str = "d") -> bytes:
    return encode_arrangements([(layout, Arrangement(reads, nbytes))])


@given(st.lists(st.sampled_from([None, HALF, Arrangement(READS, 256)]), max_size=4))
def test_arrangements_round_trip(arrangements: list[Arrangement | None]) -> None:
    buckets = tuple((f"d{i}", arrangement) for i, arrangement in enumerate(arrangements))
    layouts = {digest: LAYOUT for digest, _ in buckets}
    assert decode_arrangements(encode_arrangements(buckets), layouts) == buckets


BAD = {
    "noise": (b"noise", "not arrangements"),
    "more fields": (
        msgspec.msgpack.encode([["d", {"reads": [], "nbytes": 256, "more": 1}]]),
        "not arrangements: an unknown field",
    ),
    "nested too deep": (
        msgspec.msgpack.encode([["d", {"reads": [], "nbytes": 256, "more": 1}]])[:-1]
        + b"\x91" * 5000
        + b"\xc0",
        "not arrangements: maximum recursion depth",
    ),
    "unknown layout": (encoded(*READS, layout="e"), "was not sent: e"),
    "no buffer": (encoded(nbytes=0), "of 0 bytes, the bucket has 768"),
    "too large a buffer": (encoded(nbytes=769), "of 769 bytes, the bucket has 768"),
    "unknown tensor": (encoded(Read(2, 0, (), 8, 0)), "tensor 2 of 2"),
    "negative tensor": (encoded(Read(-1, 0, (), 8, 0)), "tensor -1 of 2"),
    "negative offset": (encoded(Read(0, -8, (), 8, 0)), "'a': a read of no bytes, or backwards"),
    "negative start": (encoded(Read(0, 0, (), 8, -8)), "'a': a read of no bytes, or backwards"),
    "negative stride": (encoded(Read(0, 64, ((2, -8),), 8, 0)), "no bytes, or backwards"),
    "no run": (encoded(Read(0, 0, (), 0, 0)), "'a': a read of no bytes, or backwards"),
    "no count": (encoded(Read(0, 0, ((0, 8),), 8, 0)), "'a': a read of no bytes, or backwards"),
    "past the tensor": (encoded(Read(1, 8, (), 9, 0)), "'b': a read ends at byte 17, the tensor"),
    "strided past it": (encoded(Read(0, 0, ((5, 128),), 8, 0)), "'a': a read ends at byte 520"),
    "past the buffer": (encoded(Read(0, 0, (), 8, 249)), "ends at byte 257 of 256"),
    "overlap": (encoded(Read(0, 0, (), 8, 0), Read(1, 0, (), 8, 7)), "share byte 7"),
}


@pytest.mark.parametrize("case", BAD)
def test_arrangements_that_leave_their_bounds_are_refused(case: str) -> None:
    data, message = BAD[case]
    with pytest.raises(WireError, match=message):
        decode_arrangements(data, {"d": LAYOUT})
    assert decode_arrangements(encoded(*READS), {"d": LAYOUT})


def known(*arrangements: Arrangement | None) -> KnownArrangements:
    pairs = zip(BUCKETS, arrangements, strict=False)
    offer = encode_arrangements([(bucket.digest, arrangement) for bucket, arrangement in pairs])
    return KnownArrangements.of(offer, BUCKETS)


def test_buckets_are_arranged_as_long_as_they_are_the_announced_ones() -> None:
    arranged = ArrangedSync(known(HALF, None, HALF))
    digest = arranged.digest
    assert len(digest) == 64
    assert [arranged.expected(i) for i in range(4)] == [HALF, None, HALF, None]
    assert arranged.of(0, BUCKETS[0]) == HALF
    arranged.keep_if_held(digest)
    assert arranged.of(1, BUCKETS[1]) is None, "nothing is won there"
    assert arranged.of(2, BUCKETS[2]) == HALF
    assert arranged.digest == digest
    assert arranged.of(3, BUCKETS[0]) is None, "there is no fourth"
    assert arranged.digest == ""


def test_a_bucket_that_is_another_one_ends_it() -> None:
    arranged = ArrangedSync(known(HALF, HALF, HALF))
    arranged.keep_if_held(arranged.digest)
    assert arranged.of(0, BUCKETS[0]) == HALF
    assert arranged.of(1, BUCKETS[2]) is None
    assert arranged.of(2, BUCKETS[2]) is None
    assert arranged.digest == ""


@pytest.mark.parametrize("held", ["", "0" * 64])
def test_an_engine_that_holds_others_gets_whole_buckets(held: str) -> None:
    arranged = ArrangedSync(known(HALF))
    assert arranged.of(0, BUCKETS[0]) == HALF
    arranged.keep_if_held(held)
    assert arranged.digest == ""
    assert arranged.of(0, BUCKETS[0]) is None


def test_nothing_is_known_at_first() -> None:
    arranged = ArrangedSync(NOTHING_KNOWN)
    arranged.keep_if_held("0" * 64)
    assert (arranged.digest, arranged.expected(0), arranged.of(0, BUCKETS[0])) == ("", None, None)


def test_the_ring_has_room_for_what_is_sent() -> None:
    """Buffers of the arranged size; grown, and packed anew, where a bucket must come whole."""
    tensors = [(f"t{i}", torch.randn(16, 16)) for i in range(4)]
    report = SyncReport(mode="compiled", replica=0)
    batches = list(BucketStream(1024).batches(iter(tensors), report))
    half = Arrangement((Read(0, 512, (), 512, 0),), 512)
    ring = StagingRing(CPU, num_buffers=2, bucket_bytes=1024)
    ring.prepare([half.nbytes] * len(batches))
    assert ring.nbytes == 2 * 512
    for _ in range(2):
        for batch, (_, tensor) in zip(batches, tensors, strict=True):
            storage = ring.pack_arranged(batch, half)
            found = torch.empty(0, dtype=torch.float32).set_(storage)
            assert torch.equal(found[:128], tensor[8:].reshape(-1))
    assert ring.nbytes == 2 * 512
    for batch, (_, tensor) in zip(batches, tensors, strict=True):
        storage = ring.pack(batch)
        found = torch.empty(0, dtype=torch.float32).set_(storage)
        assert torch.equal(found[:256], tensor.reshape(-1))
    assert ring.nbytes == 2 * 1024
    ring.free()
    assert ring.nbytes == 0


def test_a_trainer_learns_what_it_may_use(caplog: pytest.LogCaptureFixture) -> None:
    assert EngineArrangements(is_wanted=True).known_digest([]) is None, "no bucket was sent yet"
    assert EngineArrangements(is_wanted=False).known_digest(BUCKETS) is None
    arrangements = EngineArrangements(is_wanted=True)
    assert arrangements.known_digest(BUCKETS) == ""
    offer = encode_arrangements([(bucket.digest, HALF) for bucket in BUCKETS])
    arrangements.learn(offer, BUCKETS)
    assert arrangements.known_digest(BUCKETS) == digest_of(offer)
    assert arrangements.for_sync().digest == digest_of(offer)
    assert arrangements.fitting(BUCKETS).digest == digest_of(offer)
    assert arrangements.fitting(BUCKETS[1:]) == NOTHING_KNOWN
    arrangements.forget()
    assert arrangements.known_digest(BUCKETS) == ""
    with caplog.at_level(logging.WARNING):
        arrangements.learn(b"noise", BUCKETS)
    assert "the engine's arrangements do not fit: not arrangements" in caplog.text
    assert arrangements.known_digest(BUCKETS) is None, "asked for them no more"
