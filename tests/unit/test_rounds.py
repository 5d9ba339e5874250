"""The lists of what trainer ranks send in rounds: round trips, and what is refused."""

from itertools import accumulate

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sglang_loader.common.layout import WireError
from sglang_loader.common.regions.geometry import BYTES, StridedCopy, Unit
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
from sglang_loader.common.weight_map import MAPPED
from sglang_loader.load_plan.copy_table import CopyTable, TableStep
from sglang_loader.load_plan.plan import NO_TENSORS
from sglang_loader.load_plan.rounds import cut_copy, num_bytes_read, wired_steps
from unit import strided_moves
from unit.strided_moves import copies_out_of, strided_sets

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


@st.composite
def tables(draw):
    """Copies of a few shapes, each to a storage of its own, from a few shards of 96 bytes."""
    units = st.sampled_from([BYTES, Unit(4, 8, ("narrow", "wide"))])
    shapes = st.lists(units.flatmap(part_of_a_shard), min_size=1, max_size=3)
    pairs = st.tuples(st.sampled_from(draw(shapes)), st.integers(0, 3))
    drawn = draw(st.lists(pairs, max_size=9))
    return [(replace(copy, storage=i), shard) for i, (copy, shard) in enumerate(drawn)]


def part_of_a_shard(unit):
    return copies_out_of(96, unit, step=unit.src_bytes)


def origins(copy, source):
    """For each unit that is written, the bytes that it is made of, by a list of the source's."""
    return {
        place: (source[at : at + unit.src_bytes], unit)
        for place, (at, unit) in strided_moves.moves(copy)
    }


@given(
    tables(),
    st.lists(st.sampled_from([MAPPED, 0, 1, 2]), min_size=4, max_size=4),
    st.integers(1, 300),
)
def test_rounds_bring_what_the_table_copies(copies, senders, round_bytes):
    shards = [[(shard, i) for i in range(96)] for shard in range(4)]
    table = CopyTable((TableStep(tuple(copies), NO_TENSORS),))
    [step] = wired_steps(table, senders, 3, round_bytes)
    expected, found = {}, {}
    for copy, shard in copies:
        expected |= origins(copy, shards[shard])
    for copy, shard in step.mapped:
        assert senders[shard] == MAPPED
        found |= origins(copy, shards[shard])
    for each in step.rounds:
        buffer = [None] * each.nbytes
        starts = accumulate(each.sent.sizes, initial=0)
        for sender, (part, start) in enumerate(zip(each.sent.parts, starts, strict=False)):
            for read in part.reads:
                assert senders[read.memory] == sender
                for (_, to), (at, _) in strided_moves.moves(read.as_copy()):
                    assert buffer[start + to] is None, "two reads have the same place"
                    buffer[start + to] = shards[read.memory][at]
        for copy in each.copies:
            brought = origins(copy, buffer)
            assert not brought.keys() & found.keys(), "a byte is written twice"
            found |= brought
    assert found == expected
