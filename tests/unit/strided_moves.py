"""What a strided copy moves, unit by unit: the reference for regions and arrangements."""

import numpy as np

from sglang_loader.common.regions.geometry import Unit

Move = tuple[tuple[int, int], tuple[int, Unit]]
"""((storage, first byte), (first byte in the bucket, unit))."""


def moves(copy):
    """Every unit that the copy moves, by the definition of a strided copy."""
    found = []
    for index in np.ndindex(*[count for count, _, _ in copy.dims], copy.run):
        *outer, i = (int(n) for n in index)
        src = copy.src + sum(n * d[1] for n, d in zip(outer, copy.dims, strict=True))
        dst = copy.dst + sum(n * d[2] for n, d in zip(outer, copy.dims, strict=True))
        place = copy.storage, dst + i * copy.unit.dst_bytes
        found.append((place, (src + i * copy.unit.src_bytes, copy.unit)))
    return found
