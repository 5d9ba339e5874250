"""The part of a bucket that one engine rank reads.

Under tensor or expert parallelism a rank reads a fraction of every bucket. An arrangement lists the
bytes that the rank reads, and their places in a smaller, dense buffer. This buffer is sent instead
of the bucket. The engine makes the arrangement from its load plan, and the trainer fills the
buffer:

    buffer[read.start : read.start + read.nbytes] = bytes of tensor `read.tensor`, at `read.offset`,
                                                    strided as in `read.dims` and `read.run`
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec

from sglang_loader.common.regions.geometry import StridedCopy

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""A size, offset, stride or position in a message: not negative."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
"""A count in a message: at least 1."""


@dataclass(frozen=True, slots=True)
class Read:
    """A strided set of bytes of one tensor, dense in the arranged buffer.

    Attributes:
        tensor: position in the bucket's layout.
        offset: first byte, counted from the tensor's own first byte.
        dims: `(count, stride in bytes)` within the tensor, outermost first.
        run: consecutive bytes innermost.
        start: first byte in the arranged buffer. From there the bytes are dense, `dims` outermost
            first.
    """

    tensor: Size
    offset: Size
    dims: tuple[tuple[Count, Size], ...]
    run: Count
    start: Size

    @property
    def nbytes(self) -> int:
        """The number of bytes that are read."""
        return self.run * math.prod(count for count, _ in self.dims)

    @property
    def stop(self) -> int:
        """The end of the last byte read, as an offset in the tensor."""
        return self.offset + sum((count - 1) * stride for count, stride in self.dims) + self.run

    def as_copy(self) -> StridedCopy:
        """Return the copy from the tensor to the arranged buffer."""
        dims, step = [], self.run  # innermost first. `step` is the stride in the arranged buffer.
        for count, stride in reversed(self.dims):
            dims.append((count, stride, step))
            step *= count
        return StridedCopy(0, self.offset, self.start, tuple(reversed(dims)), self.run)

    @classmethod
    def from_copy(cls, copy: StridedCopy, tensor: int) -> Read:
        """Return the read of a part of `as_copy()` that `split_copy` has made."""
        dims = tuple((count, stride) for count, stride, _ in copy.dims)
        return cls(tensor, copy.src, dims, copy.run, copy.dst)


Arrangement: TypeAlias = tuple[Read, ...]
"""The reads of one rank from one bucket. No two reads overlap in the arranged buffer."""


def arranged_nbytes(reads: Iterable[Read]) -> int:
    """Return the size of the arranged buffer, in bytes."""
    return max((read.start + read.nbytes for read in reads), default=0)
