"""The batched copy's kernel in Triton's interpreter, against torch; on a GPU compiled."""

import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_loader.common.copy_kernel import TILE_WORDS, interleaved_order, rows_of
from support.kernel_copies import copy_of, launcher
from support.remote import run_interpreted

pytest.importorskip("triton")

# (shape, padding of the source's rows, padding of the target's)
SHAPES = [
    ((3,), 0, 0),
    ((TILE_WORDS,), 0, 0),
    ((2 * TILE_WORDS + 5,), 0, 0),
    ((7, 48), 16, 3),
    ((500, 48), 0, 1),
    ((3, TILE_WORDS + 1), 2, 0),
    ((4, 5, 96), 8, 2),
    ((2, 3, 4, 33), 1, 0),
    ((3, 8 * TILE_WORDS), 8, 0),
    ((6, 1), 0, 4),
    ((0, 8), 0, 0),
]


def copies(device):
    """Targets in storages filled with -1, those storages, and sources."""
    targets, whole, sources = [], [], []
    for shape, src_pad, dst_pad in SHAPES:
        *outer, run = shape
        limits = (torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max)
        source = torch.randint(*limits, (*outer, run + src_pad), device=device)
        target = torch.full((*outer, run + dst_pad), -1, dtype=torch.int64, device=device)
        sources.append(source[..., :run])
        whole.append(target)
        targets.append(target[..., dst_pad:])
    return targets, whole, sources


def check(device, num_gpus):
    """All is copied, and nothing else written."""
    targets, whole, sources = copies(device)
    launcher(targets, sources, [i % num_gpus for i in range(len(sources))])()
    for target, storage, source, (_, _, pad) in zip(targets, whole, sources, SHAPES, strict=True):
        assert torch.equal(target, source), source.shape
        assert bool((storage[..., :pad] == -1).all()), source.shape
    launcher(targets[-1:], sources[-1:])()  # nothing to do


def test_the_kernel_copies_every_word_and_no_other(tmp_path):
    run_interpreted(partial(check, "cpu", 3), tmp_path / "log")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.gpu
@pytest.mark.parametrize("num_gpus", [1, 3])
def test_the_compiled_kernel_copies_every_word_and_no_other(num_gpus):
    check("cuda", num_gpus)


@given(st.lists(st.integers(0, 3), max_size=60))
def test_at_any_time_all_gpus_are_read_from(gpus):
    order = interleaved_order(gpus)
    assert sorted(order) == list(range(len(gpus)))
    for gpu in set(gpus):
        (places,) = np.nonzero(np.array(gpus)[order] == gpu)
        assert (np.diff(order[places]) > 0).all(), "those of one GPU stay in order"
        step = len(gpus) / len(places)
        expected = (np.arange(len(places)) + 0.5) * step
        assert np.abs(places - expected).max() < len(set(gpus)) + 0.5


def test_a_copy_of_many_dimensions_becomes_rows():
    source = torch.zeros(2, 3, 4, 8, dtype=torch.int64)
    target = torch.zeros(2, 3, 4, 10, dtype=torch.int64)[..., :8]
    found = list(rows_of(copy_of(target, source)))
    assert [(src - source.data_ptr(), dst - target.data_ptr()) for src, dst, *_ in found] == [
        (i * 4 * 8 * 8, i * 4 * 10 * 8) for i in range(6)
    ]
    assert {tuple(shape) for _, _, *shape in found} == {(8, 10, 8, 4)}


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_loader.common import copy_kernel, digest

TABLES = {"tiles": "*i32", "entries": "*i64"}
TABLE_OF_DIGESTS = {"sums": "*i64", "storages": "*i64", "parts": "*i32"}
FACTORS = {"PART": digest.PART_WORDS, "BLOCK": digest.BLOCK_WORDS, **digest._FACTORS}
for kernel, signature, constants, warps in (
    (copy_kernel._copy_tiles, TABLES, {"TILE": copy_kernel.TILE_WORDS}, 8),
    (digest._add_parts, TABLE_OF_DIGESTS, FACTORS, digest.NUM_WARPS),
):
    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    for capability in (80, 90):
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options={"num_warps": warps})
        print(capability, len(compiled.asm["cubin"]))
"""


def test_the_kernels_compile_for_gpus_that_are_not_here():
    """The interpreter takes what the compiler refuses, such as a name of two types."""
    run = subprocess.run(
        [sys.executable, "-c", COMPILE],
        capture_output=True,
        text=True,
        timeout=300,
        env={key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert [line.split()[0] for line in run.stdout.splitlines()] == ["80", "90"] * 2
