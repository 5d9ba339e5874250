"""The manifest that travels with every bucket: which tensors it holds and where they lie.

Both sides import this module: the trainer encodes, the engine's loader decodes and checks. JSON
keeps it readable in a log; msgspec rejects a missing field, a wrong type or an unknown one. The
version changes whenever a field does.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec

WIRE_VERSION = 1
MAX_PAST_SYNCS = 1024


class ManifestError(ValueError):
    """A bucket that does not follow the wire format; the sync must not go on."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor: `nbytes` bytes at `offset` of the bucket's flat buffer.

    Attributes:
        name: parameter name.
        dtype: torch dtype without the prefix, such as "bfloat16".
        shape: dimensions.
        offset: first byte, a multiple of the element size.
        nbytes: bytes of the elements; 0 for an empty tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class BucketManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes one bucket of one sync.

    Attributes:
        version: `WIRE_VERSION` of the sender.
        sync_id: unique per sync; the same for all of its buckets and ranks.
        index: position of the bucket in the sync, from 0.
        last: True for the final bucket.
        num_tensors: tensors sent in this sync up to and including this bucket.
        nbytes: length of the flat buffer, in bytes.
        tensors: the bucket's tensors, in loading order.
    """

    version: int
    sync_id: str
    index: int
    last: bool
    num_tensors: int
    nbytes: int
    tensors: tuple[TensorEntry, ...]


_decoder = msgspec.json.Decoder(BucketManifest)
_encoder = msgspec.json.Encoder()


def encode(manifest: BucketManifest) -> str:
    """Serialise a manifest; `decode(encode(m)) == m`."""
    return _encoder.encode(manifest).decode()


def decode(text: str) -> BucketManifest:
    """Parse and check a manifest.

    Raises:
        ManifestError: not a manifest, another wire version, or entries that overlap, leave the
            buffer, or whose size is not that of their shape.
    """
    try:
        manifest = _decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise ManifestError(f"not a bucket manifest: {error}; got {text[:120]!r}") from None
    return checked(manifest)


def checked(manifest: BucketManifest) -> BucketManifest:
    """Return `manifest` if it is one of this release and its tensors fit their buffer.

    Raises:
        ManifestError: see `decode`.
    """
    if manifest.version != WIRE_VERSION:
        raise ManifestError(
            f"wire version {manifest.version}, this loader speaks {WIRE_VERSION}: the trainer and "
            "the engine have different releases of verl-sglang-sync installed"
        )
    _check_layout(manifest)
    return manifest


def _check_layout(manifest: BucketManifest) -> None:
    end = 0
    for entry in manifest.tensors:
        if entry.offset < end or entry.offset + entry.nbytes > manifest.nbytes:
            raise ManifestError(
                f"tensor {entry.name!r} at bytes {entry.offset}+{entry.nbytes} of bucket "
                f"{manifest.index} overlaps its neighbour or leaves the {manifest.nbytes} bytes"
            )
        if min(entry.shape, default=0) < 0 or not _holds(entry.nbytes, math.prod(entry.shape)):
            raise ManifestError(
                f"tensor {entry.name!r}: {entry.nbytes} bytes do not hold shape {entry.shape}"
            )
        end = entry.offset + entry.nbytes


def _holds(nbytes: int, numel: int) -> bool:
    """True if `nbytes` can be `numel` elements of some dtype."""
    return nbytes > 0 and nbytes % numel == 0 if numel else nbytes == 0


class SyncSequence:
    """Follows the buckets of one sync: each exactly once, in order, none left out.

    One per scheduler process. A new `sync_id` may only start with bucket 0, so a sync that broke
    off is replaced by the next one, never continued by it, and one that has begun never begins
    again.
    """

    def __init__(self) -> None:
        self._sync_id: str | None = None
        self._begun: deque[str] = deque(maxlen=MAX_PAST_SYNCS)
        self._next_index = 0
        self._num_tensors = 0

    def accept(self, manifest: BucketManifest) -> None:
        """Check that `manifest` is the next bucket; call before its tensors are loaded.

        Raises:
            ManifestError: a bucket is missing, repeated or of another sync, or tensors were lost.
        """
        if manifest.index == 0 and manifest.sync_id != self._sync_id:
            if manifest.sync_id in self._begun:
                raise ManifestError(f"sync {manifest.sync_id} is over, its first bucket came again")
            self._begun.append(manifest.sync_id)
            self._sync_id, self._next_index, self._num_tensors = manifest.sync_id, 0, 0
        if (manifest.sync_id, manifest.index) != (self._sync_id, self._next_index):
            expected = "a new sync" if self._sync_id is None else f"sync {self._sync_id}"
            raise ManifestError(
                f"got bucket {manifest.index} of sync {manifest.sync_id}, expected bucket "
                f"{self._next_index} of {expected}"
            )
        self._next_index += 1
        self._num_tensors += len(manifest.tensors)
        if self._num_tensors != manifest.num_tensors:
            raise ManifestError(
                f"after bucket {manifest.index} of sync {manifest.sync_id} "
                f"{self._num_tensors} tensors had come, the trainer had sent {manifest.num_tensors}"
            )
        if manifest.last:
            self.break_off()

    def break_off(self) -> None:
        """The sync in progress is over, complete or not."""
        self._sync_id, self._next_index = None, 0
