"""Reading in place on the trainer's side: which spans, and when it packs instead."""

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from verl_sglang_sync.bucket_stream import BucketStream
from verl_sglang_sync.memory_blocks import Block, BlockNames, share_block
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.source import SourceWatch

CPU = torch.device("cpu")
LIMIT = 1024


@pytest.fixture(autouse=True)
def by_name():
    torch.multiprocessing.set_sharing_strategy("file_system")


def in_one_storage(sizes, gap):
    flat = torch.arange(float(sum(sizes) + gap * len(sizes))).share_memory_()
    named, start = [], 0
    for i, size in enumerate(sizes):
        named.append((f"t{i}", flat[start : start + size]))
        start += size + gap
    return named


def apart(sizes):
    return [(f"t{i}", torch.rand(size).share_memory_()) for i, size in enumerate(sizes)]


def batches(stream, named):
    return list(stream.batches(iter(named), SyncReport(mode="compiled", replica=0)))


def watched(stream, named):
    watch = SourceWatch(CPU)
    for batch in batches(stream, named):
        watch.see(batch)
        del batch
    return watch.finish()


def bytes_of(block):
    """The memory at an address, as the engine sees it after mapping."""

    return torch.frombuffer(
        (ctypes.c_uint8 * block.nbytes).from_address(block.address), dtype=torch.uint8
    )


@given(st.lists(st.integers(1, 200), min_size=1, max_size=20), st.integers(0, 80), st.booleans())
def test_spans_hold_the_tensors(sizes, gap, together):
    named = in_one_storage(sizes, gap) if together else apart(sizes)
    stream = BucketStream(LIMIT)
    source = watched(stream, named)
    for batch in batches(stream, named):
        spans = source.locate(batch).spans
        packed = torch.zeros(batch.bucket.layout.nbytes, dtype=torch.uint8)
        stop = 0
        for span in spans:
            assert span.start >= stop
            stop = span.start + span.nbytes
            storage = batch.tensors[span.member].untyped_storage()
            assert Block.of(storage) == span.block
            piece = bytes_of(span.block)[span.offset : span.offset + span.nbytes]
            packed[span.start : stop].copy_(piece)
        views = batch.bucket.layout.views(packed)
        assert all(torch.equal(v, t) for (_, v), t in zip(views, batch.tensors, strict=True))


def test_a_storage_laid_out_like_the_bucket_is_one_span():
    named = in_one_storage([64] * 12, 0)  # 256 bytes each, as the layout aligns them
    stream = BucketStream(LIMIT)
    source = watched(stream, named)
    spans = [source.locate(batch).spans for batch in batches(stream, named)]
    assert [len(each) for each in spans] == [1, 1, 1]
    assert [each[0].offset for each in spans] == [0, 1024, 2048]


def test_a_bucket_whose_tensors_moved_is_packed_and_the_others_are_not():
    named = apart([100] * 12)
    stream = BucketStream(LIMIT)
    source = watched(stream, named)
    moved = [*named[:7], (named[7][0], named[7][1].clone()), *named[8:]]
    found = [source.locate(batch) is None for batch in batches(stream, moved)]
    assert found.count(True) == 1
    strided = [(n, torch.rand(2, 100).share_memory_()[0]) for n, _ in named]
    assert all(source.locate(batch) is None for batch in batches(stream, strided))


@pytest.mark.parametrize("kind", ("private", "strided"))
def test_a_bucket_with_memory_that_cannot_be_mapped_is_packed(kind):
    named = apart([100] * 12)
    bad = torch.ones(100) if kind == "private" else torch.ones(200).share_memory_()[::2]
    named[0] = ("t0", bad)
    stream = BucketStream(LIMIT)
    source = watched(stream, named)
    found = [source.locate(batch) is None for batch in batches(stream, named)]
    assert found[0]
    assert not any(found[1:])


def test_tensors_that_do_not_outlive_the_export_are_packed():
    stream, watch = BucketStream(LIMIT), SourceWatch(CPU)
    export = ((f"t{i}", torch.ones(9).share_memory_()) for i in range(3))
    for batch in stream.batches(export, SyncReport(mode="compiled", replica=0)):
        watch.see(batch)
    del batch
    assert watch.finish() is None


def test_memory_that_was_freed_in_between_is_not_trusted():
    named = apart([100] * 12)
    stream = BucketStream(LIMIT)
    source = watched(stream, named)
    gone = torch.ones(4).share_memory_()
    expired = StorageWeakRef(gone.untyped_storage())
    del gone
    first, *others = batches(stream, named)
    assert source.locate(first) is not None
    source._known[0]._storages._weak[1] = expired.cdata
    assert source.locate(first) is None
    assert all(source.locate(batch) is not None for batch in others)


def test_pieces_follow_the_slots_and_are_kept_while_those_stay():
    together = [(f"together.{name}", tensor) for name, tensor in in_one_storage([64] * 2, 0)]
    named = together + apart([64] * 2)
    stream = BucketStream(4 * LIMIT)
    source = watched(stream, named)
    [batch] = batches(stream, named)
    located = source.locate(batch)
    assert len(located.blocks) == 3
    for slots in ([0, 1, 2], [5, 3, 4]):
        pieces = located.pieces(slots)
        assert [piece.slot for piece in pieces] == slots
        assert located.pieces(list(slots)) is pieces
        for piece, span in zip(pieces, located.spans, strict=True):
            assert (piece.offset, piece.start, piece.nbytes) == (
                span.offset,
                span.start,
                span.nbytes,
            )


def test_a_block_gets_a_new_name_when_its_storage_is_gone():
    names = BlockNames()
    tensor = torch.ones(64).share_memory_()
    other = torch.ones(64).share_memory_()
    block = Block.of(tensor.untyped_storage())
    name = names.name_of(block, tensor.untyped_storage())
    assert names.name_of(block, tensor.untyped_storage()) == name
    del tensor
    assert names.name_of(block, other.untyped_storage()) != name


def test_memory_of_this_process_alone_is_refused():
    storage = torch.ones(4).untyped_storage()
    with pytest.raises(ValueError, match="only shared memory"):
        share_block(Block.of(storage), storage)
