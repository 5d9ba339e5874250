"""Wire format of the arrangements of a sync: for each of its buckets, what this engine rank reads.

    encoded = encode_arrangements([(layout_digest, arrangement), (other_digest, None)])
    digest = digest_of(encoded)                     # names them, on both sides
    buckets = decode_arrangements(encoded, layouts)

The engine sends them once; from then on both sides speak of the digest. Nothing in them is
believed: a read must lie in its tensor and in the arranged buffer, and no two may share a byte of
that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

from sglang_loader.common.layout import BucketLayout, WireError
from sglang_loader.common.regions.arrangement import Arrangement, Read

ArrangedBuckets: TypeAlias = Sequence[tuple[str, Arrangement | None]]
"""(digest of the layout, what is read of it) by bucket; None: the bucket is sent as it is."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[tuple[str, Arrangement | None], ...])


def encode_arrangements(buckets: ArrangedBuckets) -> bytes:
    """Serialise them; `decode_arrangements` gives them back."""
    return _encoder.encode(buckets)


def decode_arrangements(
    encoded: bytes, layouts: Mapping[str, BucketLayout]
) -> tuple[tuple[str, Arrangement | None], ...]:
    """Parse and check arrangements.

    Args:
        layouts: those that were sent, by digest.

    Raises:
        WireError: not arrangements, bytes that `encode_arrangements` does not write, an unknown
            layout, a read that leaves its tensor or the arranged buffer or shares bytes of it, or a
            buffer larger than the bucket's.
    """
    try:
        buckets = _decoder.decode(encoded)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"not arrangements: {error}") from None
    if _encoder.encode(buckets) != encoded:
        raise WireError("not arrangements: an unknown field, or not encoded as we do")
    for digest, arrangement in buckets:
        if arrangement is not None:
            _check(digest, arrangement, layouts)
    return buckets


def _check(digest: str, arrangement: Arrangement, layouts: Mapping[str, BucketLayout]) -> None:
    layout = layouts.get(digest)
    if layout is None:
        raise WireError(f"an arrangement of a layout that was not sent: {digest}")
    nbytes = arrangement.nbytes
    if not 0 < nbytes <= layout.nbytes:
        raise WireError(f"an arrangement of {nbytes} bytes, the bucket has {layout.nbytes}")
    for read in arrangement.reads:
        _check_read(read, layout)
    stop = 0
    for read in sorted(arrangement.reads, key=lambda read: read.start):
        if read.start < stop:
            raise WireError(f"two reads share byte {read.start} of the arranged buffer")
        stop = read.start + read.nbytes
    if stop > nbytes:
        raise WireError(f"a read ends at byte {stop} of {nbytes} arranged ones")


def _check_read(read: Read, layout: BucketLayout) -> None:
    if not 0 <= read.tensor < len(layout.tensors):
        raise WireError(f"a read of tensor {read.tensor} of {len(layout.tensors)}")
    tensor = layout.tensors[read.tensor]
    smallest = min((read.offset, read.start, *(stride for _, stride in read.dims)))
    if smallest < 0 or read.run < 1 or any(count < 1 for count, _ in read.dims):
        raise WireError(f"{tensor.name!r}: a read of no bytes, or backwards: {read}")
    if read.stop > tensor.nbytes:
        raise WireError(
            f"{tensor.name!r}: a read ends at byte {read.stop}, the tensor has {tensor.nbytes}"
        )
