"""Many strided copies in one launch: a Triton kernel over a table of tiles.

`_foreach_copy_` fuses copies only where both sides are dense; a strided copy is a launch of its
own, and its kernel computes every element's place from all dimensions. Here the copies of a bucket
become tiles of up to `TILE_WORDS` 64-bit words, each a few rows at one distance, and one launch
moves them all:

    copies = BatchedCopy(targets, sources)     # builds the table on the device, once
    copies.run()                               # asynchronous, on the current stream

Source and destination tensors are int64 views of at most `MAX_DIMS` dimensions whose innermost is
dense. The tensors are kept alive; their addresses are in the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

TILE_WORDS = 8192
_FIELDS = 6


@dataclass(frozen=True, slots=True)
class Tile:
    """`rows` rows of `run` words each; addresses and strides in bytes."""

    src: int
    dst: int
    src_stride: int
    dst_stride: int
    run: int
    rows: int


def tiles_of(target: torch.Tensor, source: torch.Tensor) -> Iterator[Tile]:
    """Cut one copy into tiles of at most `TILE_WORDS` words; pure but for the addresses."""
    size = source.element_size()
    *outer, run = source.shape
    src_strides = [stride * size for stride in source.stride()[:-1]]
    dst_strides = [stride * size for stride in target.stride()[:-1]]
    src, dst = source.data_ptr(), target.data_ptr()
    rows = outer.pop() if outer else 1
    src_row = src_strides.pop() if src_strides else 0
    dst_row = dst_strides.pop() if dst_strides else 0
    for index in itertools.product(*(range(count) for count in outer)):
        first_src = src + sum(i * stride for i, stride in zip(index, src_strides, strict=True))
        first_dst = dst + sum(i * stride for i, stride in zip(index, dst_strides, strict=True))
        if run >= TILE_WORDS:
            for row, start in itertools.product(range(rows), range(0, run, TILE_WORDS)):
                yield Tile(
                    first_src + row * src_row + start * size,
                    first_dst + row * dst_row + start * size,
                    0,
                    0,
                    min(TILE_WORDS, run - start),
                    1,
                )
            continue
        step = TILE_WORDS // run
        for row in range(0, rows, step):
            yield Tile(
                first_src + row * src_row,
                first_dst + row * dst_row,
                src_row,
                dst_row,
                run,
                min(step, rows - row),
            )


class BatchedCopy:
    """Copies `sources[i]` to `targets[i]`, all in one launch.

    Args:
        targets: int64 on one CUDA device, innermost dimension dense; no word is written twice.
        sources: of the same shapes.
    """

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        pairs = zip(targets, sources, strict=True)
        tiles = [tile for pair in pairs for tile in tiles_of(*pair)]
        table = torch.tensor(
            [(t.src, t.dst, t.src_stride, t.dst_stride, t.run, t.rows) for t in tiles],
            dtype=torch.int64,
        )
        self._kept = (targets, sources)
        self._num_tiles = len(tiles)
        self._table = table.to(targets[0].device)

    def run(self) -> None:
        """Launch on the current stream."""
        _copy_tiles[(self._num_tiles,)](self._table, TILE=TILE_WORDS, num_warps=8)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _copy_tiles(table, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        entry = table + tl.program_id(0).to(tl.int64) * 6
        src = tl.load(entry).to(tl.pointer_type(tl.int64))
        dst = tl.load(entry + 1).to(tl.pointer_type(tl.int64))
        src_stride = tl.load(entry + 2) // 8
        dst_stride = tl.load(entry + 3) // 8
        run = tl.load(entry + 4).to(tl.int32)
        rows = tl.load(entry + 5).to(tl.int32)
        word = tl.arange(0, TILE)
        if rows == 1:
            inside = word < run
            tl.store(dst + word, tl.load(src + word, mask=inside), mask=inside)
        else:
            row = word // run
            column = word - row * run
            inside = row < rows
            value = tl.load(src + row * src_stride + column, mask=inside)
            tl.store(dst + row * dst_stride + column, value, mask=inside)
