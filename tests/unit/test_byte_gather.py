"""Gathering an arrangement out of tensors: by torch, and by the kernel's tables, against bytes."""

import ctypes
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_loader.common.copies import gather_reads
from sglang_loader.common.copy_kernel import TILE_WORDS
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.arrangement import Read, end_of
from support.remote import run_interpreted
from verl_sglang_sync.routes.exchange import byte_gather
from verl_sglang_sync.routes.exchange.byte_gather import WORD_BYTES, ByteGather, GatherTable

CPU = torch.device("cpu")
FILL = 0x5A


def laid_out(sizes):
    """Reads `(tensor, offset, dims, run)` one after the other, 16 bytes between them."""
    reads = []
    stop = 0
    for tensor, offset, dims, run in sizes:
        reads.append(Read(tensor, offset, dims, run, stop))
        stop += -(-reads[-1].nbytes // 16) * 16 + 16
    return tuple(reads)


def check_packed(packing, flat, tensors):
    """The buffer holds what the reference gathers, and what lies between is untouched."""
    arrangement = packing._reads
    expected = gather_reads(arrangement, [tensor.cpu() for tensor in tensors], CPU)
    flat.fill_(FILL)
    packing.run(tensors, flat)
    covered = torch.zeros(flat.numel(), dtype=torch.bool)
    for read in arrangement:
        covered[read.start : read.start + read.nbytes] = True
    assert torch.equal(flat.cpu()[covered], expected[: flat.numel()][covered])
    assert bool((flat.cpu()[~covered] == FILL).all())


@st.composite
def arrangements(draw):
    sizes = draw(st.lists(st.integers(1, 96), min_size=1, max_size=5))
    word = draw(st.sampled_from([1, 2, 8]))
    reads = []
    for _ in range(draw(st.integers(1, 6))):
        tensor = draw(st.integers(0, len(sizes) - 1))
        units = sizes[tensor] * 8 // word
        offset = draw(st.integers(0, units - 1))
        run = draw(st.integers(1, units - offset))
        room, dims = units - offset - run, []
        for _ in range(draw(st.integers(0, 3))):
            count = draw(st.integers(1, 3))
            stride = draw(st.integers(1, max(1, room // count)))
            if (count - 1) * stride <= room:
                room -= (count - 1) * stride
                dims.append((count, stride * word))
        reads.append((tensor, offset * word, tuple(dims), run * word))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensors = [torch.randn(size, 2, generator=generator) for size in sizes]
    if draw(st.booleans()):  # what is exported may be a view of any stride
        tensors = [tensor.t().contiguous().t() for tensor in tensors]
    return laid_out(reads), tensors


@given(arrangements())
@settings(max_examples=200, deadline=None)
def test_torch_packs_what_the_reference_gathers(case):
    arrangement, tensors = case
    flat = torch.zeros(end_of(arrangement), dtype=torch.uint8)
    packing = ByteGather(arrangement, CPU)
    check_packed(packing, flat, tensors)
    check_packed(packing, torch.zeros_like(flat), [tensor + 1 for tensor in tensors])


@given(arrangements())
@settings(max_examples=200, deadline=None)
def test_the_kernel_would_move_the_words_of_the_reads(case):
    """The tables alone, run without a GPU: sources count from each tensor's first byte."""
    arrangement, tensors = case
    reads = [r for r in arrangement if _in_words(r)]
    members = sorted({read.tensor for read in reads})
    table = GatherTable.of(reads, members)
    layout = BucketLayout.pack((str(i), t.shape, t.dtype) for i, t in enumerate(tensors))
    source = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for (_, view), tensor in zip(layout.views(source), tensors, strict=True):
        view.copy_(tensor)
    expected = gather_reads(tuple(reads), tensors, CPU)
    found = torch.zeros_like(expected)
    for (src, dst, src_stride, dst_stride, run, rows), (place, target) in zip(
        table.rows.tolist(), table.places.tolist(), strict=True
    ):
        assert target == 0
        base = layout.tensors[members[place - 1]].offset
        for row in range(rows):
            at, to = base + src + row * src_stride * 8, dst + row * dst_stride * 8
            found[to : to + run * 8] = source[at : at + run * 8]
    assert torch.equal(found, expected)
    assert sorted(set(table.tiles[:, 0].tolist())) == list(range(len(table.rows)))


def _in_words(read):
    numbers = (read.start, read.offset, read.run, *(stride for _, stride in read.dims))
    return all(number % WORD_BYTES == 0 for number in numbers)


def test_a_buffer_that_is_too_small_is_refused():
    packing = ByteGather(laid_out([(0, 0, (), 64)]), CPU)
    with pytest.raises(ValueError, match="the reads need 64 from byte 0"):
        packing.run([torch.zeros(16)], torch.zeros(63, dtype=torch.uint8))
    with pytest.raises(ValueError, match="from byte 8"):
        packing.run([torch.zeros(16)], torch.zeros(96, dtype=torch.uint8)[8:])


def mixed_case(device):
    """Long, short, strided and odd reads, of tensors here and elsewhere."""
    arrangement = laid_out(
        [
            (0, 0, (), 8 * (2 * TILE_WORDS + 5)),
            (1, 64, ((7, 128),), 48),
            (1, 2, ((3, 128),), 6),
            (2, 8, ((2, 1024), (4, 256)), 16),
            (3, 0, (), 64),
            (4, 16, ((5, 64),), 8),
        ]
    )
    generator = torch.Generator().manual_seed(1)
    shapes = [(8 * TILE_WORDS,), (16, 32), (8, 64), (16,), (16, 16)]
    tensors = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    tensors[1] = tensors[1].t().contiguous().t()
    tensors[3] = tensors[3].cpu()
    return arrangement, tensors


def check_kernel(device):
    """The kernel and torch pack the same; so they do when the tensors have moved."""
    arrangement, tensors = mixed_case(device)
    for kernel in (True, False):
        flat = torch.zeros(end_of(arrangement), dtype=torch.uint8, device=device)
        packing = ByteGather(arrangement, device, use_kernel=kernel)
        check_packed(packing, flat, tensors)
        check_packed(packing, flat, tensors)
        check_packed(packing, torch.zeros_like(flat), [tensor * 2 for tensor in tensors])
        shifted = torch.zeros(8 * TILE_WORDS + 1, device=device)[1:].copy_(tensors[0])
        assert shifted.data_ptr() % WORD_BYTES
        check_packed(packing, flat, [shifted, *tensors[1:]])


@pytest.mark.parametrize("works", [True, False])
def test_a_kernel_that_moves_other_bytes_is_not_believed(works, monkeypatch, caplog):
    arrangement = laid_out([(0, 0, (), 64), (0, 64, ((2, 64),), 16), (1, 4, (), 12)])
    tensors = [torch.arange(64.0), torch.arange(8.0)]
    launched = []

    def launch(tiles, entries):
        launched.append(len(tiles))
        if works:
            for source, target, src_stride, dst_stride, run, rows in entries.tolist():
                for row in range(rows):
                    at, to = source + row * src_stride * 8, target + row * dst_stride * 8
                    ctypes.memmove(to, at, run * 8)

    monkeypatch.setattr(byte_gather, "launch", launch)
    packing = ByteGather(arrangement, CPU, use_kernel=True)
    flat = torch.zeros(end_of(arrangement), dtype=torch.uint8)
    for _ in range(3):
        check_packed(packing, flat, tensors)
    assert len(launched) == (3 if works else 1)
    assert ("gathered other bytes than torch" in caplog.text) != works


def test_the_kernel_packs_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    run_interpreted(partial(check_kernel, CPU), tmp_path / "log")


def test_a_table_of_nothing_has_no_rows():
    table = GatherTable.of([], [])
    shapes = (table.rows.shape, table.places.shape, table.tiles.shape)
    assert shapes == ((0, 6), (0, 2), (0, 2))
    assert table.rows.dtype == np.int64
