"""Reading weights where they are: the engine maps the trainer's own memory, nothing is packed.

A trainer whose export yields tensors that it keeps (one rank, or replicated weights) needs no
staging buffer. One packed sync is watched; where its tensors outlive the export in memory that can
be mapped, later syncs say of each bucket in which blocks its bytes lie:

    watch = SourceWatch(device)
    for batch in stream.batches(export, report):
        watch.see(batch)
    source = watch.finish()                    # None: go on packing
    spans = source.spans_of(batch)             # None: pack this bucket
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from verl_sglang_sync.bucket_stream import Batch, Bucket
from verl_sglang_sync.memory_blocks import Block, BlockTable

MAX_BLOCKS = 8192
"""More blocks than this are not mapped: each costs the engine a mapping and a file descriptor."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive bytes of a bucket in one block.

    Attributes:
        block: where they are.
        offset: of the first one in the block.
        start: of the first one in the bucket's layout.
        nbytes: length.
        member: position in the bucket of a tensor whose storage lies in the block.
    """

    block: Block
    offset: int
    start: int
    nbytes: int
    member: int


@dataclass(frozen=True)
class _Known:
    bucket: Bucket
    pointers: list[int]
    refs: list[StorageWeakRef]
    spans: tuple[Span, ...]


class InPlaceSource:
    """Knows in which blocks the trainer's tensors lie."""

    def __init__(self, known: dict[int, _Known]) -> None:
        self._known = known

    @property
    def indices(self) -> frozenset[int]:
        """Buckets that are expected in place."""
        return frozenset(self._known)

    def spans_of(self, batch: Batch) -> tuple[Span, ...] | None:
        """Where the bucket's bytes are; None if its tensors are not where they were."""
        known = self._known.get(batch.index)
        if known is None or known.bucket.digest != batch.bucket.digest:
            return None
        if [tensor.data_ptr() for tensor in batch.tensors] != known.pointers:
            return None
        if not all(tensor.is_contiguous() for tensor in batch.tensors):
            return None
        if any(ref.expired() for ref in known.refs):  # other memory, by chance at the same place
            return None
        return known.spans


class SourceWatch:
    """Notes where the tensors of one sync lie.

    Args:
        device: the engine's; memory elsewhere cannot be read in place.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: list[tuple[int, Bucket, list[_Seen]]] = []

    def see(self, batch: Batch) -> None:
        """Note a bucket's tensors, without keeping them."""
        if all(_is_mappable(tensor, self._device) for tensor in batch.tensors):
            seen = [_Seen.of(tensor) for tensor in batch.tensors]
            self._seen.append((batch.index, batch.bucket, seen))

    def finish(self) -> InPlaceSource | None:
        """What can be read in place from now on; None if nothing. Call it after the export."""
        table = BlockTable(self._device)
        known: dict[int, _Known] = {}
        for index, bucket, seen in self._seen:
            if any(tensor.ref.expired() for tensor in seen):
                continue
            spans = _spans(bucket, seen, table)
            if spans is not None:
                pointers = [tensor.pointer for tensor in seen]
                known[index] = _Known(bucket, pointers, [tensor.ref for tensor in seen], spans)
        blocks = {span.block for entry in known.values() for span in entry.spans}
        return InPlaceSource(known) if known and len(blocks) <= MAX_BLOCKS else None


@dataclass(frozen=True, slots=True)
class _Seen:
    pointer: int
    storage: Block
    ref: StorageWeakRef

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Seen:
        storage = tensor.untyped_storage()
        return cls(tensor.data_ptr(), Block.of(storage), StorageWeakRef(storage))


def _is_mappable(tensor: torch.Tensor, device: torch.device) -> bool:
    if tensor.device.type != device.type or not tensor.is_contiguous():
        return False
    if device.type == "cpu":
        return bool(tensor.is_shared())
    return device.index in (None, tensor.device.index)


def _spans(bucket: Bucket, seen: Sequence[_Seen], table: BlockTable) -> tuple[Span, ...] | None:
    """The bucket's bytes as few spans; None if a tensor lies in no block."""
    spans: list[Span] = []
    for i, (entry, tensor) in enumerate(zip(bucket.layout.tensors, seen, strict=True)):
        if not entry.nbytes:
            continue
        block = table.block_of(tensor.storage)
        if block is None:
            return None
        offset, nbytes = tensor.pointer - block.address, entry.nbytes
        last = spans[-1] if spans else None
        if (
            last is not None
            and last.block == block
            and offset - last.offset == entry.offset - last.start
        ):
            nbytes += entry.offset - last.start
            spans[-1] = replace(last, nbytes=nbytes)
        else:
            spans.append(Span(block, offset, entry.offset, nbytes, i))
    return tuple(spans)
