"""The map from a sync's buckets to the trainer ranks' shards, by which engines pull.

A shard is the part of one parameter that a trainer rank holds. The map numbers the shards, and says
for each bucket which bytes of which shard it consists of. The map is equal for all engine ranks and
holds as long as the trace of the export, so it is sent once. The addresses of the shards are not in
the map. They are the *bases*, one for each shard, and differ by engine rank:

    encoded = encode_weight_map(shard_nbytes, [(encode_layout(layout), pieces), ...])   # trainer
    weight_map = decode_weight_map(encoded)                                             # engine
    weight_map.buckets[0].copies(copy)         # copies from numbered shards
    shards = ShardMemory(weight_map, decode_bases(bases), blocks, device)   # in this process

A quantised tensor has no bytes in any shard, and neither have its scales. The map places the
tensor that it is made of, and the engine rank quantises that: `WeightMap.quantized`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from sglang_loader.common.bucket_source import BucketMap, BucketPiece, BucketSource, CopyFrom
from sglang_loader.common.layout import BucketLayout, WireError, decode_layout
from sglang_loader.common.quantization import Quantization
from sglang_loader.common.regions.geometry import StridedCopy
from sglang_loader.common.regions.read import Size

Bases = npt.NDArray[np.int64]
"""`[num_shards, 2]`: the number of each shard's block, and the offset of the shard in the block.

A shard that the engine rank cannot map has `SENT`, and the trainer rank that sends its bytes.
"""

SENT = -1
"""The block of a shard whose bytes are sent."""

MAPPED = -1
"""The sender of a shard that the engine rank maps."""


class _EncodedBucket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    layout: bytes
    pieces: list[BucketPiece]


class _EncodedMap(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    shard_nbytes: list[Size]
    buckets: list[_EncodedBucket]
    quantization: Quantization | None
    unquantized: _EncodedBucket | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_EncodedMap)


@dataclass(frozen=True)
class QuantizedTensors:
    """The tensors of a sync that the engine rank quantises.

    Attributes:
        layout: of the tensors before they are quantised, by the names of the quantised ones, as if
            they were one more bucket.
        places: the places of the bytes of this bucket.
    """

    quantization: Quantization
    layout: BucketLayout
    places: BucketMap


@dataclass(frozen=True, eq=False)
class WeightMap:
    """The decoded map of one sync. Maps are compared by identity.

    Attributes:
        shard_nbytes: the size of each shard.
        layouts: the layouts of the buckets, in order.
        buckets: the places of the buckets' bytes. A `BucketPiece.slot` is the number of a shard.
            The bytes of a quantised tensor, and of its scales, are in no piece.
        quantized: the quantised tensors, or None if there are none.
    """

    shard_nbytes: tuple[int, ...]
    layouts: tuple[BucketLayout, ...]
    buckets: tuple[BucketMap, ...]
    quantized: QuantizedTensors | None = None


def encode_weight_map(
    shard_nbytes: Sequence[int],
    buckets: Iterable[tuple[bytes, Sequence[BucketPiece]]],
    quantization: Quantization | None = None,
    unquantized: tuple[bytes, Sequence[BucketPiece]] | None = None,
) -> bytes:
    """Encode a map.

    Args:
        buckets: the encoded layout and the pieces of each bucket, in order.
        quantization: of the tensors that the engine quantises, or None.
        unquantized: the encoded layout and the pieces of these tensors before that, or None.
    """
    encoded = [_EncodedBucket(layout, list(pieces)) for layout, pieces in buckets]
    before = None
    if unquantized is not None:
        before = _EncodedBucket(unquantized[0], list(unquantized[1]))
    return _encoder.encode(_EncodedMap(list(shard_nbytes), encoded, quantization, before))


def decode_weight_map(data: bytes) -> WeightMap:
    """Parse and check a map.

    Raises:
        WireError: not a map, pieces that overlap, or a piece that leaves its shard or its bucket.
    """
    try:
        encoded = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a weight map: {error}") from None
    # Another process has made these bytes. Each piece is checked before anything is copied by it.
    nbytes = encoded.shard_nbytes
    decoded = [
        _decoded_bucket(bucket, f"bucket {index}", nbytes)
        for index, bucket in enumerate(encoded.buckets)
    ]
    layouts, buckets = tuple(zip(*decoded, strict=True)) if decoded else ((), ())
    if (encoded.quantization is None) != (encoded.unquantized is None):
        raise WireError("not a weight map: a quantisation without tensors, or tensors without one")
    quantized = None
    if encoded.quantization is not None and encoded.unquantized is not None:
        before = _decoded_bucket(encoded.unquantized, "what is quantised", nbytes)
        if any(len(tensor.shape) != 2 or not tensor.nbytes for tensor in before[0].tensors):
            raise WireError("only matrices can be quantised")
        quantized = QuantizedTensors(encoded.quantization, *before)
    return WeightMap(tuple(nbytes), layouts, buckets, quantized)


def _decoded_bucket(
    encoded: _EncodedBucket, name: str, shard_nbytes: Sequence[int]
) -> tuple[BucketLayout, BucketMap]:
    layout = decode_layout(encoded.layout)
    try:
        bucket = BucketMap(encoded.pieces)
    except ValueError as error:
        raise WireError(f"not a weight map: {error}") from None
    if bucket.nbytes > layout.nbytes:
        raise WireError(f"a piece of {name} leaves the bucket's {layout.nbytes} bytes")
    # One comparison for each shard, not for each piece: a piece may name many shards.
    for shard, needed in bucket.needs.items():
        nbytes = shard_nbytes[shard] if shard < len(shard_nbytes) else 0
        if needed > nbytes:
            raise WireError(f"{name} needs {needed} bytes of shard {shard}, which has {nbytes}")
    return layout, bucket


def encode_bases(bases: Sequence[tuple[int, int]]) -> bytes:
    """Encode the `(block, offset)` of each shard."""
    return np.array(bases, dtype="<i8").reshape(-1, 2).tobytes()


def decode_bases(data: bytes) -> Bases:
    """Parse the output of `encode_bases`.

    Raises:
        WireError: not bases, or a negative number other than `SENT`.
    """
    if len(data) % 16:
        raise WireError(f"{len(data)} bytes are not the bases of shards")
    bases = np.frombuffer(data, dtype="<i8").reshape(-1, 2)
    # `SENT` is the only negative number, and only of a block.
    if (bases < (SENT, 0)).any():
        raise WireError("a base is negative")
    return bases


def places_of(weight_map: WeightMap, names: Collection[str]) -> dict[str, list[CopyFrom]]:
    """Return the places of some tensors, by name. The bytes of equal places are the same.

    Raises:
        ValueError: some bytes of a tensor are in no piece, as those of a quantised one.
    """
    places = {}
    for layout, bucket in zip(weight_map.layouts, weight_map.buckets, strict=True):
        for tensor in layout.tensors:
            if tensor.name in names:
                whole = StridedCopy(0, tensor.offset, 0, (), tensor.nbytes)
                places[tensor.name] = list(bucket.copies(whole))
    return places


class ShardMemory:
    """The trainer ranks' shards in the memory of this process. Copies that are bound hold it.

    Args:
        bases: one for each shard of the map.
        blocks: flat contiguous uint8, in the order in which the bases number the blocks.
        device: on which the copies run.

    Attributes:
        senders: for each shard the trainer rank that sends its bytes, or `MAPPED`.

    Raises:
        WireError: the bases are of another map, or a shard leaves its block.
    """

    def __init__(
        self,
        weight_map: WeightMap,
        bases: Bases,
        blocks: Sequence[torch.Tensor],
        device: torch.device,
    ) -> None:
        if len(bases) != len(weight_map.shard_nbytes):
            raise WireError(f"{len(bases)} bases came for {len(weight_map.shard_nbytes)} shards")
        # Tens of thousands of shards are checked in each sync, so by numpy.
        is_sent = bases[:, 0] == SENT
        # Nothing may read outside of the mapped blocks. A block that does not exist has no room.
        room = np.array([*(block.numel() for block in blocks), -1], dtype=np.int64)
        numbers = np.minimum(bases[:, 0], len(blocks))
        # A sum with the offset might overflow.
        last = room[numbers] - np.array(weight_map.shard_nbytes, dtype=np.int64)
        if (outside := np.flatnonzero((bases[:, 1] > last) & ~is_sent)).size:
            shard = int(outside[0])
            block, offset = bases[shard].tolist()
            raise WireError(
                f"shard {shard}, {weight_map.shard_nbytes[shard]} bytes from byte {offset} of "
                f"block {block}, leaves the {len(blocks)} blocks of the trainer's memory"
            )
        self.weight_map = weight_map
        self.bases = bases
        self.blocks = tuple(blocks)
        self.device = device
        self.senders = tuple(np.where(is_sent, bases[:, 1], MAPPED).tolist())

    @property
    def are_mapped(self) -> bool:
        """True if no shard is sent."""
        return all(sender == MAPPED for sender in self.senders)

    def of(self, shards: Iterable[int]) -> dict[int, torch.Tensor]:
        """Return the memory of some shards, by their numbers."""
        found = {}
        for shard in shards:
            block, offset = self.bases[shard].tolist()
            nbytes = self.weight_map.shard_nbytes[shard]
            found[shard] = self.blocks[block][offset : offset + nbytes]
        return found

    def source(self, index: int) -> BucketSource:
        """Return the source of one bucket, for a load without a copy table."""
        bucket = self.weight_map.buckets[index]
        return BucketSource(bucket, self.of(bucket.needs))
