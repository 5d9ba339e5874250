"""Our quantiser gives the bits of verl's two: its Triton kernel, interpreted, and torch."""

import subprocess
import sys

import pytest
import torch

from sglang_loader.common.copies import quantizer
from sglang_loader.common.copies.quantizer import Matrix, quantized_by_torch, tables_of
from sglang_loader.common.quantization import SCALES, VALUES, Quantization
from support.remote import run_interpreted

BLOCK = 128, 128
CPU = torch.device("cpu")


SHAPES = ((128, 128), (256, 384), (100, 300), (1, 129), (130, 7), (384, 1))
FEW = ((130, 140), (1, 7))  # for the interpreter, which takes a second for each block


def matrices(shapes):
    """Random numbers, and all that is not: zeros, the largest and smallest numbers, one sign."""
    generator = torch.Generator().manual_seed(0)
    largest = torch.finfo(torch.bfloat16)
    for rows, columns in shapes:
        values = torch.randn(rows, columns, generator=generator)
        yield values.bfloat16()
        yield (values * 1e30).bfloat16()
        yield (values * torch.rand(rows, columns, generator=generator) ** 20).bfloat16()
        yield torch.zeros(rows, columns, dtype=torch.bfloat16)
        yield torch.zeros(rows, columns, dtype=torch.bfloat16).neg()
        yield torch.full((rows, columns), largest.max, dtype=torch.bfloat16)
        # Every number of the dtype, but infinities and NaNs.
        bits = torch.randint(-(1 << 15), 1 << 15, (rows, columns), generator=generator)
        anything = bits.to(torch.int16).view(torch.bfloat16)
        yield torch.where(anything.isfinite(), anything, torch.zeros_like(anything))
        tiny = torch.randint(0, 128, (rows, columns), generator=generator).to(torch.int16)
        yield tiny.view(torch.bfloat16)  # denormal
        yield values.half().bfloat16()


def same_bits(one, other):
    assert one.dtype == other.dtype and one.numel() == other.numel()
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def ours_in_scratch(matrix, quantization):
    """The matrix, at an odd place of a scratch memory, quantised there by the kernel."""
    rows, columns = matrix.shape
    across = [-(-size // block) for size, block in zip(matrix.shape, BLOCK, strict=True)]
    start, size = 256, matrix.numel()
    values = start + 2 * size + -2 * size % 256
    scales = values + size + -size % 256
    nbytes = scales + across[0] * across[1] * 4
    scratch = torch.full((nbytes,), 0x5A, dtype=torch.uint8, device=matrix.device)
    scratch[start : start + 2 * size] = matrix.contiguous().view(-1).view(torch.uint8)
    found = Matrix(start, rows, columns, values, scales)
    other = Matrix(0, 8, 8, 128, 192)  # another one in the same launch
    tables = (table.to(matrix.device) for table in tables_of([other, found], quantization))
    quantizer.launch(scratch, *tables, quantization)
    return (
        scratch[values : values + size].view(VALUES).view(rows, columns),
        scratch[scales:].view(SCALES).view(across),
    )


def test_torch_gives_the_bits_of_verls_torch():
    from verl.utils.kernel.fp8_kernel import _scaled_fp8_blockwise_pytorch

    quantization = Quantization("torch", BLOCK, "bfloat16")
    for matrix in matrices(SHAPES):
        theirs = _scaled_fp8_blockwise_pytorch(matrix, BLOCK)
        assert all(map(same_bits, quantized_by_torch(matrix, quantization), theirs))


def check_kernel(shapes=FEW, device=CPU):
    from verl.utils.kernel.fp8_kernel import scaled_fp8_blockwise_triton

    quantization = Quantization("triton", BLOCK, "bfloat16")
    differs = 0
    for matrix in (matrix.to(device) for matrix in matrices(shapes)):
        values, scales = scaled_fp8_blockwise_triton(matrix, BLOCK)
        ours = ours_in_scratch(matrix, quantization)
        assert all(map(same_bits, ours, (values, scales)))
        differs += not same_bits(quantized_by_torch(matrix, quantization)[1], scales)
    assert differs, "the two implementations of verl were the same"


def test_the_kernel_gives_the_bits_of_verls(tmp_path):
    pytest.importorskip("triton")
    run_interpreted(check_kernel, tmp_path / "log")


def test_blocks_alone_give_the_bits_of_the_whole():
    quantization = Quantization("torch", BLOCK, "bfloat16")
    matrix = torch.randn(300, 520, generator=torch.Generator().manual_seed(1)).bfloat16()
    values, scales = quantized_by_torch(matrix, quantization)
    part = quantized_by_torch(matrix[128:, 256:512].contiguous(), quantization)
    assert same_bits(part[0], values[128:, 256:512])
    assert same_bits(part[1], scales[1:, 2:4])


COMPILE = """
import re
import triton
from collections import Counter
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_loader.common.copies import quantizer
from verl.utils.kernel import fp8_kernel

FLOATS = ("least", "lowest", "highest", "eps", "fp8_min", "fp8_max")
POINTERS = {"sources": "bf16", "results": "fp8e4nv", "scales": "fp32", "tiles": "i32",
            "entries": "i64", "X": "bf16", "Y": "fp8e4nv", "S": "fp32"}
OURS = {"ITEM": 2, "TALL": 128, "WIDE": 128}
VERLS = {"BLOCK_M": 128, "BLOCK_N": 128, "stride_xn": 1, "stride_yn": 1, "stride_sn": 1}
ARITHMETIC = r"(?:div|mul|max|min|cvt|rcp|fma|abs|add|sub)[.][a-z0-9_.]*(?:f32|e4m3x2)[a-z0-9_.]*"

def operations(kernel, constants):
    signature = {
        name: "constexpr" if name in constants
        else "*" + POINTERS[name] if name in POINTERS
        else "fp32" if name in FLOATS else "i32"
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": quantizer.NUM_WARPS}
    )
    return Counter(re.findall(ARITHMETIC, compiled.asm["ptx"]))

ours = operations(quantizer._quantize_blocks, OURS)
verls = operations(fp8_kernel._blockwise_cast_to_fp8_kernel, VERLS)
assert ours == verls, (ours, verls)
assert {"div.full.f32", "cvt.rn.satfinite.e4m3x2.f32"} <= set(ours), ours
"""


def test_the_kernel_has_the_instructions_of_verls():
    """The interpreter divides otherwise than a GPU."""
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
