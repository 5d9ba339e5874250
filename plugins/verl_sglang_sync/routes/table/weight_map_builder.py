"""The weight map and the bases that engines pull by, made from the trace of the export. Pure.

weight_map = weight_map_of(buckets, traced)          # once, equal for all engine ranks
bases = bases_for(traced, tables, wires, reader)     # where the shards are, for one engine rank
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from sglang_loader.common.bucket_source import BucketPiece
from sglang_loader.common.layout import BucketLayout, TensorSpec, encode_layout
from sglang_loader.common.quantization import SCALE_SUFFIX, SCALES, VALUES
from sglang_loader.common.shared_memory import BufferHandle
from sglang_loader.common.weight_map import SENT, encode_bases, encode_weight_map
from verl_sglang_sync.engine.session import StoredBytes
from verl_sglang_sync.routes.table.wires import Wires
from verl_sglang_sync.sources.bucket_cutter import Bucket
from verl_sglang_sync.sources.export_trace import NotTraceable, TracedExport
from verl_sglang_sync.sources.owners import Origin, Owners

NO_BYTES = (-1, 0)
"""The entry of `MemoryTable.shards` for a parameter of which the rank holds no bytes."""


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """The locations of one rank's shards, in the form that the other ranks get.

    Attributes:
        blocks: by the name of a memory block that contains shards: a handle for each engine rank
            that maps the block, or none if no handles are wanted. A handle is used once.
        shards: by parameter: the position of its block, and the offset of the shard in the block.
            `NO_BYTES` if the rank holds no bytes of the parameter.
    """

    blocks: Mapping[str, Mapping[int, BufferHandle]]
    shards: tuple[tuple[int, int], ...]


def weight_map_of(buckets: Sequence[Bucket], traced: TracedExport) -> StoredBytes:
    """Map the bytes of every bucket to the shards of all trainer ranks.

    The shards are numbered by parameter, then by their place in the parameter. The bytes of a
    quantised tensor are mapped as they are before that.

    Raises:
        NotTraceable: the shards of a tensor are unknown, or the engine cannot quantise a tensor.
    """
    owners = traced.owners
    firsts = first_shards(traced)
    shard_nbytes = [
        stop - start
        for of_parameter in owners
        for start, stop in map(of_parameter.range_of, range(len(of_parameter.starts)))
    ]
    before, computed = unquantized_layout(buckets, traced)
    pieces = [
        (bucket.encoded, pieces_of(_without(bucket.layout, computed), traced, firsts))
        for bucket in buckets
    ]
    if not before.tensors:
        return StoredBytes.of(encode_weight_map(shard_nbytes, pieces))
    unquantized = encode_layout(before), pieces_of(before, traced, firsts)
    encoded = encode_weight_map(shard_nbytes, pieces, traced.quantization, unquantized)
    return StoredBytes.of(encoded)


def unquantized_layout(
    buckets: Sequence[Bucket], traced: TracedExport
) -> tuple[BucketLayout, frozenset[str]]:
    """Place the tensors that are quantised, as they are before that, in one more bucket.

    Returns:
        The layout, and the names of the tensors that they are quantised to.

    Raises:
        NotTraceable: the trace and the buckets do not fit.
    """
    if traced.quantization is None:
        return BucketLayout((), 0), frozenset()
    # The export has each quantised tensor and its scales, maybe in different buckets.
    tensors = [tensor for bucket in buckets for tensor in bucket.layout.tensors]
    scales = {tensor.name for tensor in tensors if tensor.dtype == SCALES}
    before: list[TensorSpec] = []
    computed: set[str] = set()
    for tensor in tensors:
        origin, scale = traced.tensors.get(tensor.name), tensor.name + SCALE_SUFFIX
        # A parameter that is trained in fp8 is exported as it is.
        if tensor.dtype != VALUES or origin is None or origin.dtype == VALUES:
            continue
        is_matrix = len(origin.shape) == 2 and 0 not in origin.shape
        if scale not in scales or origin.shape != tensor.shape or not is_matrix:
            raise NotTraceable(
                f"{tensor.name} is quantised from {list(origin.shape)} to {list(tensor.shape)}: "
                "engines quantise matrices alone, with scales of their own"
            )
        if not origin.dtype.is_floating_point:
            raise NotTraceable(f"{tensor.name} is quantised from {origin.dtype}")
        before.append((tensor.name, origin.shape, origin.dtype))
        computed |= {tensor.name, scale}
    return BucketLayout.pack(before), frozenset(computed)


def _without(layout: BucketLayout, names: Collection[str]) -> BucketLayout:
    """Return a layout without some tensors. The others stay where they are."""
    if not names:
        return layout
    left = tuple(tensor for tensor in layout.tensors if tensor.name not in names)
    return BucketLayout(left, layout.nbytes)


def pieces_of(
    layout: BucketLayout, traced: TracedExport, firsts: Sequence[int]
) -> list[BucketPiece]:
    """List the places of a bucket's bytes, in the order of the bytes.

    Bytes that are consecutive in a shard and in the bucket are one piece, even of several tensors.

    Args:
        firsts: see `first_shards`.

    Raises:
        NotTraceable: the shards of a tensor are unknown.
    """
    pieces: list[BucketPiece] = []
    for tensor, origins in zip(layout.tensors, traced.origins_of(layout), strict=True):
        if not tensor.nbytes:
            continue
        start = tensor.offset
        # A tensor may be made of several parameters: Megatron exports the parts of a fused one.
        for origin in origins:
            owners, first = traced.owners[origin.parameter], firsts[origin.parameter]
            _add_pieces(pieces, start, origin, owners, first)
            start += origin.bytes.nbytes
    return pieces


def _add_pieces(
    pieces: list[BucketPiece], start: int, origin: Origin, owners: Owners, first_shard: int
) -> None:
    """Add the pieces of a tensor's bytes of one parameter.

    Args:
        start: the offset of the bytes in the bucket.
    """
    if not origin.bytes.is_dense:
        pieces.append(_spread(start, origin, owners, first_shard))
        return
    offset, left = origin.bytes.offset, origin.bytes.nbytes
    # The bytes may run over the ends of several ranks' shards.
    while left:
        shard = owners.shard_of(offset)
        shard_start, shard_stop = owners.range_of(shard)
        nbytes = min(left, shard_stop - offset)
        _append(pieces, BucketPiece(first_shard + shard, offset - shard_start, start, nbytes))
        start, offset, left = start + nbytes, offset + nbytes, left - nbytes


def _append(pieces: list[BucketPiece], piece: BucketPiece) -> None:
    """Add a dense piece, joined with the last one if both have the same distance in the shard."""
    last = pieces[-1] if pieces else None
    # The map has far fewer pieces so: whole layers lie in one shard in the order of the export.
    if last is not None and not last.dims and last.slot == piece.slot:
        distance = piece.start - last.start
        if piece.offset - last.offset == distance:
            nbytes = distance + piece.nbytes
            pieces[-1] = msgspec.structs.replace(last, nbytes=nbytes)
            return
    pieces.append(piece)


def _spread(start: int, origin: Origin, owners: Owners, first_shard: int) -> BucketPiece:
    """Return the piece of a tensor whose bytes lie apart in its parameter.

    Args:
        start: the offset of the bytes in the bucket.
    """
    # A row-parallel weight has columns of every shard in each row, so one piece names all shards.
    low, high = owners.shard_of(origin.bytes.offset), owners.shard_of(origin.bytes.stop - 1)
    shards = tuple(
        (first_shard + shard, 0, shard_stop - shard_start)
        for shard in range(low, high + 1)
        for shard_start, shard_stop in (owners.range_of(shard),)
    )
    offset = origin.bytes.offset - owners.starts[low]
    return BucketPiece(
        first_shard + low, offset, start, origin.bytes.nbytes, origin.bytes.dims, shards
    )


def bases_for(
    traced: TracedExport, tables: Sequence[MemoryTable], wires: Wires, reader: int
) -> StoredBytes:
    """Locate every shard for one engine rank: in mapped memory, or at the rank that sends it.

    Args:
        tables: the tables of all trainer ranks. Blocks are numbered over those that are mapped.
        reader: the position of the engine rank among all engine ranks.

    Raises:
        NotTraceable: a trainer rank does not hold the shard that the trace says.
    """
    first_blocks = _starts(
        [len(table.blocks) * wires.is_mapped(rank, reader) for rank, table in enumerate(tables)]
    )
    # In the order in which `weight_map_of` numbers the shards.
    bases = []
    for parameter, owners in enumerate(traced.owners):
        for holders in owners.holders:
            # With data parallelism several ranks hold the same shard.
            owner = wires.holder(holders, reader)
            if not wires.is_mapped(owner, reader):
                bases.append((SENT, owner))
                continue
            block, offset = place = tables[owner].shards[parameter]
            if place == NO_BYTES:
                name = traced.parameters[parameter].source
                raise NotTraceable(f"trainer rank {owner} holds no bytes of {name}")
            bases.append((first_blocks[owner] + block, offset))
    return StoredBytes.of(encode_bases(bases))


def first_shards(traced: TracedExport) -> list[int]:
    """Return the number of the first shard of each parameter."""
    return _starts([len(owners.starts) for owners in traced.owners])


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)][:-1]
