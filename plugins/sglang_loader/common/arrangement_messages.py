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


class _Read(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    tensor: int
    offset: int
    dims: tuple[tuple[int, int], ...]
    run: int
    start: int


class _Bucket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    layout: str
    nbytes: int
    reads: tuple[_Read, ...] | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[_Bucket, ...])


def encode_arrangements(buckets: ArrangedBuckets) -> bytes:
    """Serialise them; `decode_arrangements` gives them back."""
    return _encoder.encode([_encoded(layout, arrangement) for layout, arrangement in buckets])


def _encoded(layout: str, arrangement: Arrangement | None) -> _Bucket:
    if arrangement is None:
        return _Bucket(layout, 0, None)
    reads = tuple(_Read(r.tensor, r.offset, r.dims, r.run, r.start) for r in arrangement.reads)
    return _Bucket(layout, arrangement.nbytes, reads)


def decode_arrangements(
    encoded: bytes, layouts: Mapping[str, BucketLayout]
) -> tuple[tuple[str, Arrangement | None], ...]:
    """Parse and check arrangements.

    Args:
        encoded: from the engine.
        layouts: those that were sent, by digest.

    Raises:
        WireError: not arrangements, of an unknown layout, a read that leaves its tensor or the
            arranged buffer or shares bytes of it, or a buffer larger than the bucket's.
    """
    try:
        buckets = _decoder.decode(encoded)
    except msgspec.MsgspecError as error:
        raise WireError(f"not arrangements: {error}") from None
    return tuple((bucket.layout, _decoded(bucket, layouts)) for bucket in buckets)


def _decoded(bucket: _Bucket, layouts: Mapping[str, BucketLayout]) -> Arrangement | None:
    if bucket.reads is None:
        return None
    layout = layouts.get(bucket.layout)
    if layout is None:
        raise WireError(f"an arrangement of a layout that was not sent: {bucket.layout}")
    if not 0 < bucket.nbytes <= layout.nbytes:
        raise WireError(f"an arrangement of {bucket.nbytes} bytes, the bucket has {layout.nbytes}")
    reads = tuple(_checked(read, layout) for read in bucket.reads)
    stop = 0
    for read in sorted(reads, key=lambda read: read.start):
        if read.start < stop:
            raise WireError(f"two reads share byte {read.start} of the arranged buffer")
        stop = read.start + read.nbytes
    if stop > bucket.nbytes:
        raise WireError(f"a read ends at byte {stop} of {bucket.nbytes} arranged ones")
    return Arrangement(reads, bucket.nbytes)


def _checked(read: _Read, layout: BucketLayout) -> Read:
    if not 0 <= read.tensor < len(layout.tensors):
        raise WireError(f"a read of tensor {read.tensor} of {len(layout.tensors)}")
    tensor = layout.tensors[read.tensor]
    smallest = min((read.offset, read.start, *(stride for _, stride in read.dims)))
    if smallest < 0 or read.run < 1 or any(count < 1 for count, _ in read.dims):
        raise WireError(f"{tensor.name!r}: a read of no bytes, or backwards: {read}")
    stop = read.offset + sum((count - 1) * stride for count, stride in read.dims) + read.run
    if stop > tensor.nbytes:
        raise WireError(
            f"{tensor.name!r}: a read ends at byte {stop}, the tensor has {tensor.nbytes}"
        )
    return Read(read.tensor, read.offset, read.dims, read.run, read.start)
