"""Strided bytes of one memory that are packed into a dense buffer, as plain numbers.

buffer[read.start : read.start + read.nbytes] = bytes of memory `read.tensor`, at `read.offset`,
                                                strided as in `read.dims` and `read.run`
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from sglang_loader.common.regions.geometry import StridedCopy

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""A size, offset, stride or position in a message: not negative."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
"""A count in a message: at least 1."""


class Read(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A strided set of bytes of one memory, dense in the buffer.

    Attributes:
        memory: its number.
        offset: first byte, counted from the memory's own first byte.
        dims: `(count, stride in bytes)` within the memory, outermost first.
        run: consecutive bytes innermost.
        start: first byte in the buffer. From there the bytes are dense, `dims` outermost first.
    """

    memory: Size
    offset: Size
    dims: tuple[tuple[Count, Size], ...]
    run: Count
    start: Size

    @property
    def nbytes(self) -> int:
        """The number of bytes that are read."""
        nbytes = self.run
        for count, _ in self.dims:
            nbytes *= count
        return nbytes

    @property
    def stop(self) -> int:
        """The end of the last byte read, as an offset in the memory."""
        return self.offset + sum((count - 1) * stride for count, stride in self.dims) + self.run

    def as_copy(self) -> StridedCopy:
        """Return the copy from the memory to the buffer."""
        dims, step = [], self.run  # innermost first. `step` is the stride in the buffer.
        for count, stride in reversed(self.dims):
            dims.append((count, stride, step))
            step *= count
        return StridedCopy(0, self.offset, self.start, tuple(reversed(dims)), self.run)
