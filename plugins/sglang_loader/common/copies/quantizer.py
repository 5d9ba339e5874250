"""Quantises matrices in scratch memory to fp8, block by block, in one launch.

    quantizer = MatrixQuantizer(quantization, [Matrix(...), ...])
    for launch in quantizer.on(scratch):      # from and to the same memory
        launch()                              # asynchronous on a GPU

The results have the bits of verl's quantiser, which has two implementations: a Triton kernel, and
torch. Each block is computed from the block alone, so a part of a weight that is made of whole
blocks gives the same bits as the whole weight. The Triton arithmetic has no replacement in torch,
because its division is rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import cache, partial

import numpy as np
import torch

from sglang_loader.common.copies.kernel import tile_table
from sglang_loader.common.copies.triton_kernels import kernel_works, tl, triton
from sglang_loader.common.quantization import SCALES, VALUES, Quantization

LARGEST = torch.finfo(VALUES).max
LEAST_SCALED = 1e-10
"""The magnitude that the Triton arithmetic takes for a block of smaller numbers."""

NUM_WARPS = 8


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix to quantise. Places are in bytes of the scratch memory, and the data there is dense.

    Attributes:
        source: the place of the matrix.
        values: the place of the result.
        scales: the place of the scales of its blocks.
    """

    source: int
    rows: int
    columns: int
    values: int
    scales: int


class MatrixQuantizer:
    """The quantiser of some matrices in scratch memory. See the module."""

    def __init__(self, quantization: Quantization, matrices: Sequence[Matrix]) -> None:
        self._quantization = quantization
        self._matrices = matrices
        # Kept on the device, because an upload waits for the stream.
        self._tables: tuple[torch.device, torch.Tensor, torch.Tensor] | None = None

    def on(self, scratch: torch.Tensor) -> list[Callable[[], object]]:
        """Return functions that quantise the matrices in this memory, flat uint8.

        Raises:
            RuntimeError: the trainer quantises by a Triton kernel, which does not work here.
        """
        if self._quantization.method == "torch":
            return [partial(_quantize_by_torch, scratch, each, self._quantization)
                    for each in self._matrices]  # fmt: skip
        if not is_available(scratch.device):
            raise RuntimeError(
                f"the trainer quantises by a Triton kernel, which does not work on {scratch.device}"
            )
        if self._tables is None or self._tables[0] != scratch.device:
            tiles, entries = tables_of(self._matrices, self._quantization)
            self._tables = scratch.device, tiles.to(scratch.device), entries.to(scratch.device)
        _, tiles, entries = self._tables
        return [partial(launch, scratch, tiles, entries, self._quantization)]


def blocks_across(size: int, block: int) -> int:
    """Return the number of blocks along a dimension."""
    return -(-size // block)


def quantized_by_torch(
    matrix: torch.Tensor, quantization: Quantization
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix as verl's implementation in torch does.

    Returns:
        The values, and the scales `[blocks down, blocks across]`.
    """
    (rows, columns), (tall, wide) = matrix.shape, quantization.block
    padding = (0, -columns % wide, 0, -rows % tall)
    blocks = torch.nn.functional.pad(matrix, padding).to(torch.float32)
    blocks = blocks.view(blocks_across(rows, tall), tall, blocks_across(columns, wide), wide)
    peaks = blocks.abs().amax(dim=(1, 3), keepdim=True)
    # A quotient with a number in front would be a product with the reciprocal.
    factors = torch.div(LARGEST, peaks)
    factors = torch.where((peaks == 0) | (peaks == torch.inf), torch.ones_like(factors), factors)
    values = (blocks * factors).clamp_(-LARGEST, LARGEST).to(VALUES)
    values = values.view(blocks.shape[0] * tall, -1)[:rows, :columns]
    return values, factors.reciprocal().view(blocks.shape[0], -1)


def _quantize_by_torch(scratch: torch.Tensor, matrix: Matrix, quantization: Quantization) -> None:
    rows, columns = matrix.rows, matrix.columns
    source = _at(scratch, matrix.source, quantization.dtype, rows, columns)
    values, scales = quantized_by_torch(source, quantization)
    _at(scratch, matrix.values, VALUES, rows, columns).copy_(values)
    _at(scratch, matrix.scales, SCALES, *scales.shape).copy_(scales)


def _at(
    scratch: torch.Tensor, place: int, dtype: torch.dtype, rows: int, columns: int
) -> torch.Tensor:
    nbytes = rows * columns * dtype.itemsize
    return scratch[place : place + nbytes].view(dtype).view(rows, columns)


def tables_of(
    matrices: Sequence[Matrix], quantization: Quantization
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `tile_table` of the blocks of matrices, and the fields of the matrices."""
    tall, wide = quantization.block
    nums = [blocks_across(each.rows, tall) * blocks_across(each.columns, wide) for each in matrices]
    entries = np.array([astuple(each) for each in matrices], dtype=np.int64).reshape(-1, 5)
    return torch.from_numpy(tile_table(nums)), torch.from_numpy(entries)


def launch(
    scratch: torch.Tensor, tiles: torch.Tensor, entries: torch.Tensor, quantization: Quantization
) -> None:
    """Run the kernel on the current stream. The tables (`tables_of`) are on the device."""
    tall, wide = quantization.block
    whole = scratch.numel() // SCALES.itemsize * SCALES.itemsize
    typed = (scratch[:whole].view(dtype) for dtype in (quantization.dtype, VALUES, SCALES))
    if len(tiles):
        # The three numbers are arguments, as in verl's kernel: the compiler may not fold them.
        _quantize_blocks[(len(tiles),)](
            *typed, tiles, entries, LEAST_SCALED, -LARGEST, LARGEST,
            ITEM=quantization.dtype.itemsize, TALL=tall, WIDE=wide, num_warps=NUM_WARPS,
        )  # fmt: skip


@cache
def is_available(device: torch.device) -> bool:
    """Return True if the kernel works on `device`. Tried once."""
    quantization = Quantization("triton", (16, 16), "bfloat16")

    def quantizes_a_matrix() -> bool:
        # Powers of two with the largest number of fp8, so that no result is rounded.
        expected = torch.full((20, 40), LARGEST, dtype=torch.bfloat16, device=device)
        expected[:, 1::2] = -0.5
        matrix = Matrix(0, 20, 40, 1600, 2400)
        scratch = torch.zeros(2424, dtype=torch.uint8, device=device)
        scratch[:1600] = (expected / 2).view(-1).view(torch.uint8)
        tiles, entries = tables_of([matrix], quantization)
        launch(scratch, tiles.to(device), entries.to(device), quantization)
        values = _at(scratch, matrix.values, VALUES, 20, 40).to(torch.bfloat16)
        scales = _at(scratch, matrix.scales, SCALES, 2, 3)
        return torch.equal(values, expected) and bool(((scales - 0.5).abs() < 1e-6).all())

    return kernel_works("quantises weights", device, quantizes_a_matrix)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _quantize_blocks(  # type: ignore[no-untyped-def]
        sources,
        results,
        scales,
        tiles,
        entries,
        least,
        lowest,
        highest,
        ITEM: tl.constexpr,
        TALL: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        # This program's block: the number of its `Matrix`, and its place in the matrix.
        tile = tiles + tl.program_id(0).to(tl.int64) * 2
        entry = entries + tl.load(tile).to(tl.int64) * 5
        part = tl.load(tile + 1).to(tl.int64)
        rows = tl.load(entry + 1)
        columns = tl.load(entry + 2)
        across = (columns + WIDE - 1) // WIDE
        row = part // across * TALL + tl.arange(0, TALL)[:, None]
        column = part % across * WIDE + tl.arange(0, WIDE)[None, :]
        inside = (row < rows) & (column < columns)
        place = row * columns + column
        source = sources + tl.load(entry) // ITEM + place
        block = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        # The same operations, in the same order, as in verl's kernel.
        peak = tl.maximum(tl.max(tl.abs(block)), least)
        scale = peak / highest
        factor = 1.0 / scale
        values = tl.clamp(block * factor, lowest, highest).to(results.dtype.element_ty)
        tl.store(results + tl.load(entry + 3) + place, values, mask=inside)
        tl.store(scales + tl.load(entry + 4) // 4 + part, scale)
