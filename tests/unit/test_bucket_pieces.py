"""Where a message says that a bucket's bytes are: what is mapped, and what is refused."""

import pytest
import torch

from sglang_loader.common.bucket_source import BucketMap, BucketPiece, BucketSource
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.session.messages import SessionError
from sglang_loader.session.mapped_memory import SourceCache

LAYOUT = BucketLayout.pack([("t", (4, 8), torch.uint8)])
BUFFERS = {slot: torch.arange(64, dtype=torch.uint8) + 100 * slot for slot in range(2)}
ROWS = ((4, 4), (2, 16), (4, 1))
"""Of a row-parallel weight of [4, 8] bytes: two shards of 16 bytes."""
SHARDS = ((0, 16, 16), (1, 32, 16))


def source_of(piece):
    return BucketSource(BucketMap([piece]), BUFFERS)


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
    "piece",
    [
        BucketPiece(0, 0, 0, 32, ROWS, SHARDS[:1]),
        BucketPiece(0, 1, 0, 32, ROWS, SHARDS),
        BucketPiece(0, 0, 0, 16, ROWS, SHARDS),
    ],
)
def test_a_piece_outside_of_its_shards_is_refused(piece):
    with pytest.raises(ValueError, match="leaves its memory"):
        source_of(piece)


@pytest.mark.parametrize(
    ("piece", "needs"),
    [
        (BucketPiece(0, 40, 0, 32), {0: 72}),
        (BucketPiece(0, 33, 0, 32, ROWS), {0: 65}),
        (BucketPiece(0, 0, 0, 32, ROWS, ((0, 16, 16), (1, 56, 16))), {0: 32, 1: 72}),
    ],
)
def test_a_map_names_the_size_of_each_memory(piece, needs):
    assert BucketMap([piece]).needs == needs


def test_a_bucket_in_other_memory_reuses_its_map():
    sources = SourceCache()
    here, there = (torch.zeros(24, dtype=torch.uint8) for _ in range(2))
    first = sources.of(3, here, 24)
    assert sources.of(3, here, 24) is first
    sources.clear()
    second = sources.of(3, there, 24)
    assert second is not first
    assert second.map is first.map
    assert second.memories[0] is there


def test_a_bucket_of_another_size_has_another_map():
    sources, memory = SourceCache(), torch.zeros(24, dtype=torch.uint8)
    assert sources.of(3, memory, 24).map is not sources.of(3, memory, 16).map
    with pytest.raises(SessionError, match="it has 25 bytes, the buffer 24"):
        sources.of(3, memory, 25)
