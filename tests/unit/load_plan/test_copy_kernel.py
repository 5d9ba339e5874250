"""The batched copy's tables, and that its kernel compiles; what it copies: `test_fused_copies`."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_loader.common.copies.kernel import interleaved_order, rows_of
from support.kernel_copies import copy_of

pytest.importorskip("triton")


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
from sglang_loader.common import digest
from sglang_loader.common.copies import kernel as copy_kernel

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


def test_the_kernels_compile_for_absent_gpus():
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
