"""Where a message says that a bucket's bytes are: what is mapped, and what is refused."""

import weakref

import pytest
import torch

from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.session.messages import (
    BucketPiece,
    LoadBucket,
    SessionError,
    encode_pieces,
)
from sglang_loader.session.mapped_memory import SourceCache

LAYOUT = BucketLayout.pack([("t", (4, 8), torch.uint8)])
BUFFERS = {slot: torch.arange(64, dtype=torch.uint8) + 100 * slot for slot in range(2)}
ROWS = ((4, 4), (2, 16), (4, 1))
"""Of a row-parallel weight of [4, 8] bytes: two shards of 16 bytes."""
SHARDS = ((0, 16, 16), (1, 32, 16))
PIECES = [BucketPiece(3, 0, 0, 16), BucketPiece(1, 8, 16, 8)]


def message(pieces):
    return LoadBucket(
        index=3,
        layout=b"layout",
        pieces=encode_pieces(pieces),
        buffers=[],
        read_only=True,
        arranged=False,
    )


def source_of(*pieces):
    return SourceCache().of(message(pieces), BUFFERS, LAYOUT.nbytes)


@pytest.mark.parametrize(
    ("piece", "left", "right"),
    [
        (BucketPiece(0, 0, 0, 32, ROWS, SHARDS), BUFFERS[0][16:32], BUFFERS[1][32:48]),
        (BucketPiece(1, 4, 0, 32, ROWS), BUFFERS[1][4:20], BUFFERS[1][20:36]),
    ],
    ids=["over the shards that it names", "within one buffer"],
)
def test_a_piece_may_be_spread(piece, left, right):
    packed = source_of(piece).packed(LAYOUT)
    expected = torch.cat([left.view(4, 4), right.view(4, 4)], dim=1)
    assert torch.equal(packed[:32].view(4, 8), expected)


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (BucketPiece(2, 0, 0, 32), "slot 2: not mapped"),
        (BucketPiece(0, 40, 0, 32), "leaves its memory"),
        (BucketPiece(0, 0, LAYOUT.nbytes, 32), "leaves the bucket's"),
        (BucketPiece(0, 0, 0, 32, ROWS, ((0, 16, 16), (2, 0, 16))), "slot 2: not mapped"),
        (
            BucketPiece(0, 0, 0, 32, ROWS, ((0, 16, 16), (1, 56, 16))),
            "needs 72 bytes of slot 1, whose buffer has 64",
        ),
        (BucketPiece(0, 0, 0, 32, ROWS, SHARDS[:1]), "leaves its memory"),
        (BucketPiece(0, 1, 0, 32, ROWS, SHARDS), "leaves its memory"),
        (BucketPiece(0, 0, 0, 16, ROWS, SHARDS), "leaves its memory"),
        (BucketPiece(0, 33, 0, 32, ROWS), "leaves its memory"),
    ],
)
def test_bytes_outside_of_what_is_mapped_are_refused(piece, reason):
    with pytest.raises(SessionError, match=reason):
        source_of(piece)


def memory_in_slots(*sizes):
    """In slots 1 and 3."""
    memories = (torch.zeros(size, dtype=torch.uint8) for size in sizes)
    return dict(zip((1, 3), memories, strict=True))


def test_a_bucket_in_other_memory_reuses_its_map():
    sources, here, there = SourceCache(), memory_in_slots(16, 16), memory_in_slots(16, 16)
    first = sources.of(message(PIECES), here, 24)
    assert sources.of(message(PIECES), here, 24) is first
    sources.clear()
    second = sources.of(message(PIECES), there, 24)
    assert second is not first
    assert second.map is first.map
    assert all(second.memories[slot] is there[slot] for slot in (1, 3))


def test_other_pieces_have_another_map():
    sources, slots = SourceCache(), memory_in_slots(16, 16)
    first = sources.of(message(PIECES), slots, 24)
    others = message([PIECES[0], BucketPiece(1, 0, 16, 8)])
    assert sources.of(others, slots, 24).map is not first.map


def test_only_two_maps_of_a_bucket_are_kept():
    sources, slots = SourceCache(), memory_in_slots(16, 16)
    ways = [message([PIECES[0], BucketPiece(1, offset, 16, 8)]) for offset in range(3)]
    exported, pulled = (sources.of(way, slots, 24).map for way in ways[:2])
    assert sources.of(ways[0], slots, 24).map is exported
    assert sources.of(ways[1], slots, 24).map is pulled
    exported = weakref.ref(exported)
    sources.of(ways[2], slots, 24)
    assert exported() is None
    assert sources.of(ways[1], slots, 24).map is pulled


def test_a_known_map_of_smaller_memory_is_refused():
    sources = SourceCache()
    sources.of(message(PIECES), memory_in_slots(16, 16), 24)
    with pytest.raises(SessionError, match="leaves its memory"):
        sources.of(message(PIECES), memory_in_slots(16, 15), 24)
    with pytest.raises(SessionError, match="slot 1: not mapped"):
        sources.of(message(PIECES), {3: torch.zeros(16, dtype=torch.uint8)}, 24)
    with pytest.raises(SessionError, match="leaves the bucket's 16 bytes"):
        sources.of(message(PIECES), memory_in_slots(16, 16), 16)
