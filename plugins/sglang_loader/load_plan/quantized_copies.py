"""Copies from quantised tensors as work on the tensors before they were quantised. Pure.

A load plan copies from a tensor in fp8 and from its scales. A quantised tensor has no bytes in the
trainer's memory, but the tensor that it is made of has. So each copy becomes

1. copies of whole blocks of that tensor, from the shards to scratch memory,
2. a `Matrix` there, which is quantised in place,
3. the copy of the plan, from the results.

The matrix encloses all blocks of which the plan of a bucket reads a value or a scale. If the shards
of an engine rank cut a block, the rank reads the whole block. A tensor that is too large for the
scratch memory is divided into *strips* of block rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from msgspec.structs import replace

from sglang_loader.common.bucket_source import CopyFrom
from sglang_loader.common.copies.quantizer import Matrix, blocks_across
from sglang_loader.common.layout import ALIGNMENT_BYTES, BucketLayout, BucketTensor
from sglang_loader.common.quantization import SCALE_SUFFIX, SCALES, VALUES
from sglang_loader.common.regions.compose import ByteMap, compose
from sglang_loader.common.regions.geometry import (
    BYTES,
    Region,
    StridedCopy,
    Unit,
    describe_copy,
    split_copy,
)
from sglang_loader.common.weight_map import QuantizedTensors
from sglang_loader.load_plan.plan import SCRATCH


class _Part(NamedTuple):
    """A copy from a quantised tensor or from its scales, whose `src` is an offset there."""

    copy: StridedCopy
    is_scales: bool


@dataclass(frozen=True)
class Strip:
    """Consecutive block rows of one tensor, of which a bucket's plan reads some blocks.

    Attributes:
        tensor: before it is quantised, as in `QuantizedTensors.layout`.
        rows: the range of the blocks' rows, and likewise `columns`. Both in elements.
        parts: the copies of the plan from these blocks and their scales.
    """

    quantized: QuantizedTensors
    tensor: BucketTensor
    rows: tuple[int, int]
    columns: tuple[int, int]
    parts: Sequence[_Part]

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def num_columns(self) -> int:
        return self.columns[1] - self.columns[0]

    @property
    def source_bytes(self) -> int:
        """The bytes of the blocks before they are quantised, in scratch memory."""
        return self.num_rows * self.num_columns * self.quantized.quantization.dtype.itemsize

    def matrix_at(self, start: int) -> tuple[Matrix, int]:
        """Return the matrix of the blocks, from a place in scratch memory on, and its end."""
        tall, wide = self.quantized.quantization.block
        num_scales = blocks_across(self.num_rows, tall) * blocks_across(self.num_columns, wide)
        values = start + _aligned(self.source_bytes)
        scales = values + _aligned(self.num_rows * self.num_columns * VALUES.itemsize)
        matrix = Matrix(start, self.num_rows, self.num_columns, values, scales)
        return matrix, scales + _aligned(num_scales * SCALES.itemsize)

    def reads(self, matrix: Matrix) -> Iterator[CopyFrom]:
        """Yield the copies that bring the blocks from the shards to the matrix."""
        tensor, dtype = self.tensor, self.quantized.quantization.dtype
        size, width = tensor.dtype.itemsize, tensor.shape[1]
        first = tensor.offset + (self.rows[0] * width + self.columns[0]) * size
        shape = self.num_rows, self.num_columns
        source = Region(first, shape, (width, 1), size)
        target = Region(matrix.source, shape, (self.num_columns, 1), dtype.itemsize)
        unit = BYTES
        if tensor.dtype != dtype:
            unit = Unit(size, dtype.itemsize, (tensor.dtype, dtype))
        yield from self.quantized.places.copies(describe_copy(SCRATCH, source, target, unit))

    def writes(self, matrix: Matrix) -> Iterator[StridedCopy]:
        """Yield the copies of the plan, from the results in scratch memory."""
        tall, wide = self.quantized.quantization.block
        rows, columns = self.tensor.shape
        of_values = _results_at(
            matrix.values, VALUES.itemsize, (rows, columns), self.rows, self.columns
        )
        blocks = blocks_across(rows, tall), blocks_across(columns, wide)
        of_scales = _results_at(
            matrix.scales,
            SCALES.itemsize,
            blocks,
            (self.rows[0] // tall, blocks_across(self.rows[1], tall)),
            (self.columns[0] // wide, blocks_across(self.columns[1], wide)),
        )
        for copy, is_scales in self.parts:
            places = of_scales if is_scales else of_values
            if places.is_dense:
                yield _moved(copy, places.offset + copy.src)
            else:
                yield from compose(places, copy)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _results_at(
    start: int,
    itemsize: int,
    shape: tuple[int, int],
    rows: tuple[int, int],
    columns: tuple[int, int],
) -> ByteMap:
    """Map the bytes of a whole matrix to a dense part of the matrix, which begins at `start`.

    Bytes that are not in the part are mapped to anything. No copy reads them.
    """
    width, pitch = shape[1] * itemsize, (columns[1] - columns[0]) * itemsize
    offset = start - rows[0] * pitch - columns[0] * itemsize
    if width == pitch:
        return ByteMap(offset, ((shape[0] * width, 1),))
    return ByteMap(offset, ((shape[0], pitch), (width, 1)))


def divided(
    copies: Iterable[StridedCopy], layout: BucketLayout, quantized: QuantizedTensors, limit: int
) -> tuple[list[StridedCopy], list[Strip]]:
    """Divide the copies of one bucket into those from plain tensors, and strips of quantised ones.

    Args:
        limit: about the largest `Strip.source_bytes`, if that is more than one row of blocks.

    Raises:
        ValueError: a tensor has another shape or dtype than its quantised form must have.
    """
    before = {tensor.name: tensor for tensor in quantized.layout.tensors}
    _check(layout, before, quantized)
    plain: list[StridedCopy] = []
    parts: defaultdict[str, list[_Part]] = defaultdict(list)
    for copy in copies:
        for part in split_copy(_widest_first(copy), layout.starts):
            tensor = layout.tensors[layout.tensor_at(part.src)]
            within = _moved(part, part.src - tensor.offset)
            scaled = tensor.name.removesuffix(SCALE_SUFFIX)
            if tensor.name in before:
                parts[tensor.name].append(_Part(within, False))
            elif scaled in before:
                parts[scaled].append(_Part(within, True))
            else:
                plain.append(part)
    strips = [
        strip
        for name, of_tensor in parts.items()
        for strip in _strips(before[name], of_tensor, quantized, limit)
    ]
    return plain, strips


def _widest_first(copy: StridedCopy) -> StridedCopy:
    """Order the dimensions of a copy by source stride, so that few cuts divide the source."""
    if len(copy.dims) < 2:
        return copy
    return replace(copy, dims=tuple(sorted(copy.dims, key=itemgetter(1), reverse=True)))


def _moved(copy: StridedCopy, src: int) -> StridedCopy:
    """Return a copy from another place. There are tens of thousands, and `replace` is slow."""
    return StridedCopy(copy.storage, src, copy.dst, copy.dims, copy.run, copy.unit)


def _check(
    layout: BucketLayout, before: dict[str, BucketTensor], quantized: QuantizedTensors
) -> None:
    tall, wide = quantized.quantization.block
    for tensor in layout.tensors:
        scaled = before.get(tensor.name.removesuffix(SCALE_SUFFIX))
        if scaled is None:
            continue
        rows, columns = scaled.shape
        fits = (tensor.dtype, tensor.shape) == (VALUES, scaled.shape)
        if tensor.name != scaled.name:
            num_scales = blocks_across(rows, tall) * blocks_across(columns, wide)
            fits = (tensor.dtype, tensor.nbytes) == (SCALES, num_scales * SCALES.itemsize)
        if not fits:
            raise ValueError(
                f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}, which is not what "
                f"{list(scaled.shape)} is quantised to"
            )


def _strips(
    tensor: BucketTensor, parts: Sequence[_Part], quantized: QuantizedTensors, limit: int
) -> Iterator[Strip]:
    quantization = quantized.quantization
    (rows, columns), (tall, wide) = tensor.shape, quantization.block
    across = blocks_across(columns, wide)
    # The bytes of one row of blocks: before it is quantised, of the values, and of the scales.
    source_row = tall * columns * quantization.dtype.itemsize
    num_rows = max(1, limit // source_row)  # of blocks in a strip
    values_row, scales_row = tall * columns * VALUES.itemsize, across * SCALES.itemsize
    by_strip: defaultdict[int, list[_Part]] = defaultdict(list)
    if num_rows * tall >= rows:  # the usual case
        by_strip[0], parts = [*parts], ()
    for copy, is_scales in parts:
        size = num_rows * (scales_row if is_scales else values_row)
        starts = range(size, copy.src_bounds()[1], size)
        for cut in split_copy(copy, starts):
            by_strip[cut.src // size].append(_Part(cut, is_scales))
    for of_strip in by_strip.values():
        ranges = [
            # In blocks.
            _enclosing(part.copy, scales_row, (SCALES.itemsize, 1))
            if part.is_scales
            else _enclosing(part.copy, columns * VALUES.itemsize, (wide * VALUES.itemsize, tall))
            for part in of_strip
        ]
        top, bottom = min(r[0] for r in ranges) * tall, max(r[1] for r in ranges) * tall
        left, right = min(r[2] for r in ranges) * wide, max(r[3] for r in ranges) * wide
        yield Strip(
            quantized, tensor, (top, min(bottom, rows)), (left, min(right, columns)), of_strip
        )


def _enclosing(
    copy: StridedCopy, row_bytes: int, block: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Return the range of block rows, and that of block columns, that enclose what a copy reads.

    Args:
        row_bytes: of the matrix that the copy reads.
        block: the bytes of a block in a row, and its rows.
    """
    wide, tall = block
    row, column = divmod(copy.src, row_bytes)
    steps = [(count - 1, *divmod(stride, row_bytes)) for count, stride, _ in copy.dims]
    last_row = row + sum(number * down for number, down, _ in steps)
    end = column + sum(number * right for number, _, right in steps)
    end += copy.run * copy.unit.src_bytes
    if end > row_bytes:  # the copy goes on in the next row
        column, end = 0, row_bytes
        last_row = (copy.src_bounds()[1] - 1) // row_bytes
    return row // tall, last_row // tall + 1, column // wide, blocks_across(end, wide)
