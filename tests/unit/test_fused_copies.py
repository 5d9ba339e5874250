"""Strided copies between memories: by torch, and by the kernel's tables, against bytes."""

import ctypes
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_loader.common.copies import fused as fused_copies
from sglang_loader.common.copies.fused import FusedCopies
from sglang_loader.common.copies.kernel import TILE_WORDS, tables_of
from sglang_loader.common.regions.read import Read
from support.remote import run_interpreted
from unit.strided_moves import strided_sets

CPU = torch.device("cpu")
FILL = 0x5A


def laid_out(sizes):
    """Reads `(memory, offset, dims, run)` one after the other, 16 bytes between them."""
    reads = []
    stop = 0
    for tensor, offset, dims, run in sizes:
        reads.append(Read(tensor, offset, dims, run, stop))
        stop += -(-reads[-1].nbytes // 16) * 16 + 16
    return tuple(reads)


def check_gathered(copies, reads, tensors, device=CPU):
    """The target holds what torch gathers, and what lies between is untouched."""
    nbytes = max((read.start + read.nbytes for read in reads), default=0)
    expected = torch.zeros(nbytes, dtype=torch.uint8)
    for read in reads:
        if read.nbytes:
            data = tensors[read.memory].cpu().reshape(-1).view(torch.uint8)
            sizes = [*(count for count, _ in read.dims), read.run]
            strides = [*(stride for _, stride in read.dims), 1]
            part = data.as_strided(sizes, strides, int(data.storage_offset()) + read.offset)
            expected[read.start : read.start + read.nbytes] = part.reshape(-1)
    flat = torch.full((nbytes,), FILL, dtype=torch.uint8, device=device)
    memories = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
    for launch in copies.between(memories, [flat], device):
        launch()
    covered = torch.zeros(flat.numel(), dtype=torch.bool)
    for read in reads:
        covered[read.start : read.start + read.nbytes] = True
    assert torch.equal(flat.cpu()[covered], expected[covered])
    assert bool((flat.cpu()[~covered] == FILL).all())


def copies_of(reads):
    return FusedCopies([(read.as_copy(), read.memory) for read in reads])


@st.composite
def sets_of_reads(draw):
    sizes = draw(st.lists(st.integers(1, 96), min_size=1, max_size=5))
    word = draw(st.sampled_from([1, 2, 8]))
    reads = []
    for _ in range(draw(st.integers(1, 6))):
        tensor = draw(st.integers(0, len(sizes) - 1))
        reads.append((tensor, *draw(strided_sets(sizes[tensor] * 8, step=word, shortest=0))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return laid_out(reads), [torch.randn(size, 2, generator=generator) for size in sizes]


@given(sets_of_reads())
@settings(max_examples=200, deadline=None)
def test_torch_copies_what_the_reference_gathers(case):
    reads, tensors = case
    check_gathered(copies_of(reads), reads, tensors)


def move_words(tiles, rows):
    """What the kernel does, by the addresses of its table."""
    _, in_order = tables_of(rows.tolist())
    assert sorted(tiles.tolist()) == in_order.tolist()
    for source, target, src_stride, dst_stride, run, num_rows in rows.tolist():
        for row in range(num_rows):
            at, to = source + row * src_stride * 8, target + row * dst_stride * 8
            ctypes.memmove(to, at, run * 8)


@given(sets_of_reads())
@settings(max_examples=200, deadline=None)
def test_the_kernel_moves_words_of_any_location(case):
    reads, tensors = case
    copies = copies_of(reads)
    with (
        mock.patch.object(fused_copies, "is_available", return_value=True),
        mock.patch.object(fused_copies, "launch", move_words),
        mock.patch.object(fused_copies, "peer_gpu_of", lambda memory: f"{memory.numel() % 3}"),
        mock.patch.object(fused_copies, "copy_views", wraps=fused_copies.copy_views) as by_torch,
    ):
        check_gathered(copies, reads, tensors)
        assert by_torch.call_count == sum(not _in_words(read) for read in reads)
        check_gathered(copies, reads, [tensor + 1 for tensor in tensors])


def _in_words(read):
    numbers = (read.start, read.offset, read.run, *(stride for _, stride in read.dims))
    return all(number % 8 == 0 for number in numbers)


def check_kernel(device):
    """Long, short, strided and odd reads, of tensors here, elsewhere, and at odd addresses; rows
    of one tile, of several, and several to a tile.
    """
    reads = laid_out(
        [
            (0, 0, (), 8 * (2 * TILE_WORDS + 5)),
            (1, 64, ((7, 128),), 48),
            (1, 2, ((3, 128),), 6),
            (2, 8, ((2, 1024), (4, 256)), 16),
            (3, 0, (), 64),
            (4, 16, ((5, 64),), 8),
            (0, 64, (), 8 * TILE_WORDS),
            (0, 8, ((3, 16 * (TILE_WORDS + 1)),), 8 * (TILE_WORDS + 1)),
            (0, 0, ((500, 8 * 49),), 8 * 48),
        ]
    )
    generator = torch.Generator().manual_seed(1)
    shapes = [(16 * TILE_WORDS,), (16, 32), (8, 64), (16,), (16, 16)]
    tensors = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    tensors[3] = tensors[3].cpu()
    copies = copies_of(reads)
    check_gathered(copies, reads, tensors, device)
    check_gathered(copies, reads, [tensor * 2 for tensor in tensors], device)
    shifted = torch.zeros(16 * TILE_WORDS + 1, device=device)[1:].copy_(tensors[0])
    assert shifted.data_ptr() % 8
    check_gathered(copies, reads, [shifted, *tensors[1:]], device)


def check_interpreted():
    with mock.patch.object(fused_copies, "is_available", return_value=True):
        check_kernel(CPU)


def test_the_kernel_copies_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    run_interpreted(check_interpreted, tmp_path / "log")
