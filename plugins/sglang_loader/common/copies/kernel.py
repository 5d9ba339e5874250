"""Many strided copies in one launch: a Triton kernel over the tiles of all of them.

`_foreach_copy_` fuses copies only if both sides are dense, and reaches 70 % of the memory's
bandwidth. A strided copy is a launch of its own. Here the copies of a bucket are cut into tiles of
up to `TILE_WORDS` 64-bit words, each a part of a row or a few rows. One launch moves all tiles
(`fused` makes the tables of them).

If sources lie on several GPUs, their tiles are interleaved. Each reader then reads from all GPUs at
any time, and no GPU serves all readers at once while the other GPUs serve none. Measured in
`benchmarks/results/`: `copy_kernels` (beside torch's own copies) and `many_readers`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from sglang_loader.common.copies.triton_kernels import kernel_works, tl, triton
from sglang_loader.common.regions.geometry import StridedCopy

TILE_WORDS = 8192
WORD = torch.int64


Rows: TypeAlias = tuple[int, int, int, int, int, int]
"""`(source, target, source stride, target stride, run, rows)`: `rows` rows of `run` consecutive
64-bit words. Addresses are in bytes, strides in words.
"""


def rows_of(copy: StridedCopy) -> Iterator[Rows]:
    """Yield one copy of whole words as sets of evenly spaced rows."""
    *outer, (rows, src_stride, dst_stride) = copy.dims or ((1, 0, 0),)
    steps = src_stride // WORD.itemsize, dst_stride // WORD.itemsize
    for index in itertools.product(*(range(count) for count, _, _ in outer)):
        src = copy.src + sum(i * stride for i, (_, stride, _) in zip(index, outer, strict=True))
        dst = copy.dst + sum(i * stride for i, (_, _, stride) in zip(index, outer, strict=True))
        yield src, dst, *steps, copy.run // WORD.itemsize, rows


def tile_table(nums_tiles: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return `(entry, part of the entry)` of every tile, given the number of tiles of each entry.

    Each program of a kernel takes one tile.
    """
    counts = np.array(nums_tiles, dtype=np.int64)
    numbers = np.repeat(np.arange(len(counts)), counts)
    parts = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([numbers, parts], axis=1).astype(np.int32)


def interleaved_order(gpus: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return an order of items that spreads the items of each GPU evenly over the whole.

    The items of one GPU keep their order.

    Args:
        gpus: for each item the number of its GPU.
    """
    numbers = np.asarray(gpus, dtype=np.int64)
    position = np.empty(len(numbers))  # from 0 to 1
    for gpu in np.unique(numbers):
        (items,) = np.nonzero(numbers == gpu)
        position[items] = (np.arange(len(items)) + 0.5) / len(items)
    return np.argsort(position, kind="stable")


def tables_of(entries: Sequence[Rows]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Return the rows as an array of shape `[n, 6]`, and their `tile_table`.

    Each tile is a part of a long row, or several short rows.
    """
    fields = np.array(entries, dtype=np.int64).reshape(-1, 6)
    run, rows = fields.T[4:]
    # Tiles of a long row times the number of rows, or short rows, as many in a tile as fit.
    return fields, tile_table(-(-run // TILE_WORDS) * -(-rows // np.maximum(TILE_WORDS // run, 1)))


def launch(tiles: torch.Tensor, entries: torch.Tensor) -> None:
    """Run the kernel on the current stream. The tables (`tables_of`) are on the device."""
    if len(tiles):
        _copy_tiles[(len(tiles),)](tiles, entries, TILE=TILE_WORDS, num_warps=8)


@cache
def is_available(device: torch.device) -> bool:
    """Return True if the kernel works on `device`. Tried once."""

    def copies_a_row() -> bool:
        source = torch.arange(8, dtype=WORD, device=device)
        target = torch.zeros_like(source)
        rows, tiles = tables_of([(source.data_ptr(), target.data_ptr(), 0, 0, 8, 1)])
        launch(torch.from_numpy(tiles).to(device), torch.from_numpy(rows).to(device))
        return torch.equal(target, source)

    return kernel_works("copies weights", device, copies_a_row)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _copy_tiles(tiles, entries, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        # This program's tile: the number of its `Rows`, and its part of them.
        tile = tiles + tl.program_id(0).to(tl.int64) * 2
        entry = entries + tl.load(tile).to(tl.int64) * 6
        part = tl.load(tile + 1).to(tl.int64)
        src = tl.load(entry).to(tl.pointer_type(tl.int64))
        dst = tl.load(entry + 1).to(tl.pointer_type(tl.int64))
        src_stride = tl.load(entry + 2)
        dst_stride = tl.load(entry + 3)
        run = tl.load(entry + 4)
        rows = tl.load(entry + 5)
        word = tl.arange(0, TILE)
        # Each name has one type: Triton compiles both branches.
        if run >= TILE:
            # A part of one long row.
            per_row = (run + TILE - 1) // TILE
            line = part // per_row
            start = (part - line * per_row) * TILE
            within = word < run - start
            words = tl.load(src + line * src_stride + start + word, mask=within)
            tl.store(dst + line * dst_stride + start + word, words, mask=within)
        else:
            # As many whole short rows as fit into a tile.
            short = run.to(tl.int32)
            step = TILE // short
            near = word // short
            column = word - near * short
            row = part * step + near
            inside = (near < step) & (row < rows)
            value = tl.load(src + row * src_stride + column, mask=inside)
            tl.store(dst + row * dst_stride + column, value, mask=inside)
