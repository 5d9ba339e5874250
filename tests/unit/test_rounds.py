"""The lists of what trainer ranks send in rounds: round trips, and what is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_loader.common.layout import WireError
from sglang_loader.common.regions.geometry import StridedCopy
from sglang_loader.common.regions.read import Read
from sglang_loader.common.rounds import (
    RoundPart,
    SentRound,
    decode_parts,
    decode_rounds,
    encode_parts,
    encode_rounds,
    parts_of,
)
from sglang_loader.load_plan.rounds import cut_copy, num_bytes_read
from unit.strided_moves import strided_sets

PART, NOTHING = RoundPart((Read(3, 8, ((2, 64),), 16, 16),), 48), RoundPart((), 0)
ROUNDS = [SentRound((PART, NOTHING)), SentRound((NOTHING, PART))]


def test_rounds_and_parts_round_trip():
    assert decode_rounds(encode_rounds(ROUNDS), 2) == ROUNDS
    parts = {7: parts_of(ROUNDS, 1), 9: parts_of(ROUNDS, 0)}
    assert decode_parts(encode_parts(parts)) == parts
    assert ROUNDS[0].sizes == [48, 0] and ROUNDS[0].payloads == [32, 0]


BAD_ROUNDS = {
    "of another number of ranks": (encode_rounds(ROUNDS), 3, "sent by 2 ranks, not 3"),
    "bytes past the end": (
        encode_rounds([SentRound((RoundPart(PART.reads, 40),))]), 1, "packs 48 bytes, and sends 40",
    ),
    "a part of a word": (encode_rounds([SentRound((RoundPart((), 4),))]), 1, "not rounds"),
    "a read before the first byte": (
        msgspec.msgpack.encode([[[[[0, -1, [], 8, 0]], 8]]]), 1, "not rounds",
    ),
    "noise": (b"noise", 1, "not rounds"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "num_ranks", "error"), BAD_ROUNDS.values(), ids=BAD_ROUNDS)
def test_rounds_that_do_not_fit_are_refused(data, num_ranks, error):
    with pytest.raises(WireError, match=error):
        decode_rounds(data, num_ranks)


@given(strided_sets(4096), st.integers(1, 9000), st.booleans())
def test_parts_of_a_copy_move_its_bytes(moved, nbytes, is_wide):
    offset, dims, run = moved
    scale = 512 if is_wide else 1
    whole = Read(0, offset, dims, run * scale, 0).as_copy() if not dims else None
    whole = whole or Read(0, offset, dims, run, 0).as_copy()
    parts = cut_copy(whole, nbytes)
    assert moves(whole) == sorted(move for part in parts for move in moves(part))
    assert len(parts) == 1 or num_bytes_read(parts[0]) < num_bytes_read(whole)


def moves(copy: StridedCopy):
    """Each byte's place in the source and in the destination, in order."""
    pairs = [(copy.src + i, copy.dst + i) for i in range(copy.run)]
    for count, src, dst in reversed(copy.dims):
        pairs = [(a + i * src, b + i * dst) for i in range(count) for a, b in pairs]
    return sorted(pairs)
