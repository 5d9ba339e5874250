"""Copies of views by the kernel, whose tables are made of the views themselves."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from sglang_loader.common.copies.kernel import (
    WORD,
    interleaved_order,
    launch,
    rows_of,
    tables_of,
)
from sglang_loader.common.regions.geometry import StridedCopy


def copy_of(target: torch.Tensor, source: torch.Tensor) -> StridedCopy:
    """The copy between views of `WORD`s whose innermost stride is 1, from address to address."""
    *outer, run = source.shape
    size = WORD.itemsize
    steps = zip(outer, source.stride()[:-1], target.stride()[:-1], strict=True)
    dims = tuple((count, src * size, dst * size) for count, src, dst in steps)
    return StridedCopy(0, source.data_ptr(), target.data_ptr(), dims, run * size)


def launcher(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], gpus: Sequence[int] = ()
) -> Callable[[], None]:
    """Copies `sources[i]` to `targets[i]`, all in one launch; `gpus`: by source, the number of the
    GPU on which it lies: all of them are read from at a time. The views must live as long.
    """
    pairs = zip(targets, sources, strict=True)
    found = [list(rows_of(copy_of(*pair))) if pair[1].numel() else [] for pair in pairs]
    rows, tiles = tables_of([each for of_pair in found for each in of_pair])
    if len(gpus):
        of_rows = np.repeat(gpus, [len(of_pair) for of_pair in found])
        tiles = tiles[interleaved_order(of_rows[tiles[:, 0]])]
    device = targets[0].device
    return partial(launch, torch.from_numpy(tiles).to(device), torch.from_numpy(rows).to(device))
