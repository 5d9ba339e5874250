"""Copies of views by the kernel, whose tables are made of the views themselves."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from sglang_loader.common.copy_kernel import (
    Rows,
    interleave_tiles,
    launch,
    rows_between,
    tables_of,
)


def rows_of(target: torch.Tensor, source: torch.Tensor) -> list[Rows]:
    """One copy as sets of rows; views of `WORD`s whose innermost stride is 1."""
    places = source.data_ptr(), target.data_ptr()
    return list(rows_between(*places, source.shape, source.stride(), target.stride()))


def launcher(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], gpus: Sequence[int] = ()
) -> Callable[[], None]:
    """Copies `sources[i]` to `targets[i]`, all in one launch; `gpus`: by source, the number of the
    GPU on which it lies: all of them are read from at a time. The views must live as long.
    """
    pairs = zip(targets, sources, strict=True)
    found = [rows_of(target, source) if source.numel() else [] for target, source in pairs]
    rows, tiles = tables_of([each for of_pair in found for each in of_pair])
    if len(gpus):
        tiles = interleave_tiles(tiles, np.repeat(gpus, [len(of_pair) for of_pair in found]))
    device = targets[0].device
    return partial(launch, torch.from_numpy(tiles).to(device), torch.from_numpy(rows).to(device))
