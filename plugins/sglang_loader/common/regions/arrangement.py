"""The part of a bucket that one engine rank reads.

Under tensor or expert parallelism a rank reads a fraction of every bucket. An arrangement says
which: bytes of the bucket's tensors, laid densely into a smaller buffer that takes the bucket's
place. The engine makes it from its plan; whoever sends fills the buffer:

    buffer[read.start : read.start + read.nbytes] = bytes of tensor `read.tensor`, at `read.offset`,
                                                    strided as `read.dims` and `read.run` say
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec

from sglang_loader.common.regions.geometry import StridedCopy

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""A number, offset or stride: none that comes over the wire is negative."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
"""Likewise, and at least 1."""


@dataclass(frozen=True, slots=True)
class Read:
    """A strided set of bytes of one tensor, dense in the arranged buffer.

    Attributes:
        tensor: position in the bucket's layout.
        offset: first byte, counted from the tensor's own first byte.
        dims: `(count, stride in bytes)` within the tensor, outermost first.
        run: consecutive bytes innermost.
        start: first byte in the arranged buffer; dense from there, `dims` outermost first.
    """

    tensor: Size
    offset: Size
    dims: tuple[tuple[Count, Size], ...]
    run: Count
    start: Size

    @property
    def nbytes(self) -> int:
        """Bytes read, and bytes of the arranged buffer."""
        return self.run * math.prod(count for count, _ in self.dims)

    @property
    def stop(self) -> int:
        """Where the bytes end in the tensor."""
        return self.offset + sum((count - 1) * stride for count, stride in self.dims) + self.run

    @property
    def steps(self) -> tuple[int, ...]:
        """Strides of `dims` in the arranged buffer, in bytes."""
        steps, step = [], self.run
        for count, _ in reversed(self.dims):
            steps.append(step)
            step *= count
        return tuple(reversed(steps))

    def as_copy(self) -> StridedCopy:
        """From the tensor to the arranged buffer."""
        pairs = zip(self.dims, self.steps, strict=True)
        dims = tuple((count, stride, step) for (count, stride), step in pairs)
        return StridedCopy(0, self.offset, self.start, dims, self.run)

    @classmethod
    def from_copy(cls, copy: StridedCopy, tensor: int) -> Read:
        """Of a part of `as_copy()` that `split_copy` has made: it is dense in the buffer, too."""
        dims = tuple((count, stride) for count, stride, _ in copy.dims)
        return cls(tensor, copy.src, dims, copy.run, copy.dst)


Arrangement: TypeAlias = tuple[Read, ...]
"""What one rank reads of one bucket: no byte of the arranged buffer twice."""


def arranged_nbytes(reads: Iterable[Read]) -> int:
    """Size of the arranged buffer, in bytes."""
    return max((read.start + read.nbytes for read in reads), default=0)
