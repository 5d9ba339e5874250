"""The exchange of shards as numbers: the ranks simulated on bytes, against plain indexing."""

import itertools
import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_loader.common.regions.arrangement import Read, arranged_nbytes
from sglang_loader.common.regions.compose import ByteMap, compose_read
from sglang_loader.common.regions.geometry import Region
from unit.strided_moves import indices, regions, strided_sets
from verl_sglang_sync.routes.shards import exchange_plan
from verl_sglang_sync.routes.shards.exchange_plan import (
    pieces_of,
    plan_reader,
    plan_sends,
    received,
    total_nbytes,
)
from verl_sglang_sync.sources.shard_reads import Origin, held_by_all, nearest, shards_of_rows


def bytes_of(source):
    return indices(source.offset, source.dims)


def bytes_read(read):
    return indices(read.offset, [*read.dims, (read.run, 1)])


def test_column_slices_need_one_part_each_way():
    half = ByteMap.of(Region(8, (6, 4), (8, 1), 2))  # the right half of [6, 8] bfloat16
    for offset, dims, run, num_parts in (
        (0, (), 48, 1),  # all of it is one run in its own order
        (16, (), 16, 1),
        (4, ((6, 8),), 4, 1),
        (4, (), 40, 3),  # ends in the middle of rows
    ):
        assert len(list(compose_read(half, Read(0, offset, dims, run, 0)))) == num_parts


def test_copies_share_readers_nearest_node_first():
    """TP 2 x DP 8 on nodes of 8: a shard has a replica on every other rank of one stage of two."""
    holders = tuple(range(16, 32, 2))
    readers = {owner: [] for owner in holders}
    for reader in range(32):
        readers[nearest(holders, reader)].append(reader)
    for owner, its in readers.items():
        assert len(its) == 32 // len(holders)
        assert [reader for reader in its if reader >= 16] == [owner, owner + 1]


@st.composite
def buckets(draw):
    """Parameters on ranks, exported views of them, and what each rank reads of these."""
    world_size = draw(st.integers(1, 5))
    ranks = draw(st.permutations(range(world_size)))
    owners, origins, reads, ends = [], [], [[] for _ in ranks], [0] * world_size
    for number in range(draw(st.integers(1, 4))):
        region, full, itemsize = draw(regions())
        rows, row_bytes = full[0], itemsize * math.prod(full[1:])
        kind = draw(st.sampled_from(["shards", "replicated shards", "everyone"]))
        held = shards_of_rows(rows, row_bytes, ranks[: draw(st.integers(1, world_size))])
        if kind == "everyone":
            held = held_by_all(rows * row_bytes, world_size)
        if kind == "replicated shards":
            spare = [rank for rank in ranks if not held.is_held_by(rank)]
            replicas = [(*has, *spare[i : i + 1]) for i, has in enumerate(held.holders)]
            held = replace(held, holders=tuple(tuple(sorted(has)) for has in replicas))
        owners.append(held)
        for _ in range(draw(st.integers(1, 2))):
            origins.append(Origin(number, ByteMap.of(region)))
            for rank in range(world_size):
                for _ in range(draw(st.integers(0, 2))):
                    nbytes = origins[-1].bytes.nbytes
                    start = ends[rank] + draw(st.integers(0, 9))
                    offset, dims, run = draw(strided_sets(nbytes))
                    read = Read(len(origins) - 1, offset, dims, run, start)
                    reads[rank].append(read)
                    ends[rank] = start + read.nbytes
    arrangements = [
        tuple(draw(st.permutations(found))) for found, end in zip(reads, ends, strict=True)
    ]
    if draw(st.booleans()):  # engines that read the same share one
        arrangements[-1] = arrangements[0]
    return owners, origins, arrangements


def copied(reads, memories, target):
    for read in reads:
        picked = memories[read.tensor][bytes_read(read)]
        assert not target[read.start : read.start + read.nbytes].any(), "filled twice"
        target[read.start : read.start + read.nbytes] = picked


def shards_of(rank, owners, full):
    """What a rank holds of each parameter."""
    shards = [np.empty(0, dtype=np.int64) for _ in owners]
    for number, held in enumerate(owners):
        for shard, holders in enumerate(held.holders):
            if rank in holders:
                start, stop = held.range_of(shard)
                shards[number] = full[number][start:stop]
    return shards


def arranged(arrangement, origins, full):
    """The arranged buffer of full parameters, by plain indexing."""
    expected = np.zeros(arranged_nbytes(arrangement), dtype=np.int64)
    for read in arrangement:
        origin = origins[read.tensor]
        tensor = full[origin.parameter][bytes_of(origin.bytes)]
        picked = tensor[bytes_read(read)]
        expected[read.start : read.start + read.nbytes] = picked
    return expected


@settings(max_examples=300, deadline=None)
@given(buckets(), st.integers(0, 3), st.integers(1, 5), st.sampled_from([1, 8, 4096]))
def test_every_reader_receives_what_it_reads(bucket, apart, num_pieces, cut_bytes):
    """Readers are the trainer ranks, or as many other ranks of the group, or more."""
    owners, origins, reads = bucket
    full, first = [], 1
    for held in owners:  # every byte of every parameter has a value of its own, none is 0
        full.append(np.arange(first, first + held.nbytes))
        first += held.nbytes
    num_trainers = len(reads)
    if apart:
        reads = [()] * num_trainers + [*reads, *reads][: num_trainers + apart - 1]
    plans = [plan_sends(rank, reads, origins, owners) for rank in range(num_trainers)]
    with mock.patch.object(exchange_plan, "CUT_BYTES", cut_bytes):
        pieces = [pieces_of(plan, num_pieces) for plan in plans]
        parts = [plan_reader(r, len(reads), reads[r], origins, owners) for r in range(len(reads))]
        found = [received(each, num_pieces) for each in parts]
    arrived = [[] for _ in reads]
    parts_sent = [part for piece in pieces for sent in piece for part in sent.reads]
    assert total_nbytes(parts_sent) == sum(sum(its.payloads) for its in found), (
        "nothing else is sent"
    )
    for number in range(num_pieces):
        for rank, sent in enumerate(piece[number] for piece in pieces):
            assert list(sent.nbytes) == [each.sizes[number][rank] for each in found], (
                "both ends of a pair agree"
            )
            scratch = np.zeros(sum(sent.nbytes), dtype=np.int64)
            copied(sent.reads, shards_of(rank, owners, full), scratch)
            for reader, part in enumerate(np.split(scratch, np.cumsum(sent.nbytes)[:-1])):
                arrived[reader].append(part)
    for read, its, came in zip(reads, found, map(np.concatenate, arrived), strict=True):
        assert sum(its.payloads) == sum(each.nbytes for each in read)
        buffer, stop = np.zeros(arranged_nbytes(read), dtype=np.int64), 0
        for piece in its.pieces:
            assert piece.start >= stop, "no byte is there twice"
            stop = piece.start + piece.nbytes
            dims = piece.dims or ((piece.nbytes, 1),)
            buffer[piece.start : stop] = came[indices(piece.offset, dims)]
        assert np.array_equal(buffer, arranged(read, origins, full)), "0 where nothing is read"


def test_columns_come_as_one_piece_each_exchange():
    """A row-parallel weight, read whole, whose columns four trainer ranks hold."""
    rows, columns, num_ranks = 48, 512, 4
    parts = [
        tuple(
            Read(0, row * columns, (), columns, (row * num_ranks + rank) * columns)
            for row in range(rows)
        )
        for rank in range(num_ranks)
    ]
    found = received(parts, 3)
    assert len(found.pieces) == 3
    for number, piece in enumerate(found.pieces):
        strip = sum(found.sizes[number]) // num_ranks
        assert piece.dims == ((rows // 3, columns), (num_ranks, strip), (columns, 1))


def test_every_piece_uses_all_ranks_and_whole_words():
    """Experts in their order: cut by place in the buffer, one rank would send all of a piece."""
    world_size, experts, row = 4, 64, 1 << 14
    held = shards_of_rows(experts, row, range(world_size))
    origins = [Origin(0, ByteMap.of(Region(i * row, (row,), (1,), 1))) for i in range(experts)]
    whole = tuple(Read(i, 0, (), row, i * row) for i in range(experts))
    plans = [plan_sends(rank, [whole] * 4, origins, [held]) for rank in range(world_size)]
    assert {total_nbytes(itertools.chain(*plan)) for plan in plans} == {experts * row}
    for pieces in zip(*(pieces_of(plan, 3) for plan in plans), strict=True):
        for piece in pieces:
            assert sum(piece.nbytes) <= experts * row // 3 + 4 * exchange_plan.CUT_BYTES
            for read in piece.reads:
                assert (read.start % 2048, read.offset % 2048) == (0, 0)


def test_a_strided_part_is_cut_between_its_rows():
    held = shards_of_rows(8, 8, range(2))
    origin = Origin(0, ByteMap.of(Region(0, (8, 8), (8, 1), 1)))
    columns = [(Read(0, 4 * rank, ((8, 8),), 4, 0),) for rank in range(2)]
    first, second = pieces_of(plan_sends(0, columns, [origin], [held]), 2)
    assert first.reads == (Read(0, 0, ((2, 8),), 4, 0), Read(0, 4, ((2, 8),), 4, 8))
    assert second.reads == (Read(0, 16, ((2, 8),), 4, 0), Read(0, 20, ((2, 8),), 4, 8))


def test_two_reads_into_one_byte_are_refused():
    held, origin = shards_of_rows(4, 8, range(1)), Origin(0, ByteMap.of(Region(0, (32,), (1,), 1)))
    reads = (Read(0, 0, (), 8, 0), Read(0, 8, (), 8, 7))
    with pytest.raises(ValueError, match="bytes of the arranged buffer are filled twice"):
        plan_reader(0, 1, reads, [origin], [held])
