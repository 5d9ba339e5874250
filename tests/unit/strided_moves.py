"""What a strided copy moves, unit by unit: the reference for regions and arrangements."""

import numpy as np

from sglang_loader.common.regions.geometry import Unit

Move = tuple[tuple[int, int], tuple[int, Unit]]
"""((storage, first byte), (first byte in the bucket, unit))."""


def indices(offset, dims):
    """Every place of a strided set of `(count, stride)`, in order."""
    found = np.array([offset])
    for count, stride in dims:
        found = (found[:, None] + np.arange(count) * stride).ravel()
    return found


def moves(copy):
    """Every unit that the copy moves, by the definition of a strided copy."""
    unit, dims = copy.unit, copy.dims
    src = indices(copy.src, [*((n, step) for n, step, _ in dims), (copy.run, unit.src_bytes)])
    dst = indices(copy.dst, [*((n, step) for n, _, step in dims), (copy.run, unit.dst_bytes)])
    pairs = zip(src.tolist(), dst.tolist(), strict=True)
    return [((copy.storage, to), (at, unit)) for at, to in pairs]
