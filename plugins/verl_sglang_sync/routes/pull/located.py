"""Where all ranks' parameters are, as the engine rank on this device is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch

from sglang_loader.common.regions.arrangement import Arrangement, Read
from sglang_loader.common.session.messages import BucketPiece
from verl_sglang_sync.collective import own_rank
from verl_sglang_sync.engine.session import SharedBlock
from verl_sglang_sync.routes.route import ReadyBucket
from verl_sglang_sync.sources.bucket_stream import Bucket
from verl_sglang_sync.sources.export_trace import TracedExport
from verl_sglang_sync.sources.known_sources import KnownSources
from verl_sglang_sync.sources.shard_memory import MemoryTable, consecutive_reads
from verl_sglang_sync.sources.transfer_plan import ShardRead, shard_reads


@dataclass(frozen=True)
class PullPlan:
    """Which bytes of which shards the buckets are; true until the parameters are replaced.

    Attributes:
        traced: what it was made of.
        buckets: of the export.
        reads: by bucket.
    """

    traced: TracedExport
    buckets: list[Bucket]
    reads: list[list[ShardRead]]

    @classmethod
    def of(cls, traced: TracedExport, buckets: list[Bucket], rank: int) -> PullPlan:
        """Find the buckets' bytes.

        Args:
            traced: the export.
            buckets: of it.
            rank: whose own copy is read of a parameter that every rank has all of.

        Raises:
            NotTraceable: a tensor was not traced, or its bytes are not consecutive in a parameter.
        """
        return cls(traced, buckets, [consecutive_reads(b.layout, traced, rank) for b in buckets])

    def is_of(self, traced: TracedExport, buckets: list[Bucket]) -> bool:
        """True if it was made of these."""
        return self.traced is traced and self.buckets == buckets


@dataclass(frozen=True)
class Located:
    """Where all ranks' parameters are at present.

    Attributes:
        known: recognises this rank's parameters.
        blocks: of all ranks; the engine maps them with the first bucket.
        buckets: in those blocks; a slot is a position in `blocks`.
    """

    known: KnownSources
    blocks: tuple[SharedBlock, ...]
    buckets: tuple[ReadyBucket, ...]

    @classmethod
    def of(cls, plan: PullPlan, known: KnownSources, tables: Sequence[MemoryTable]) -> Located:
        """Where this rank's engine finds every bucket.

        Args:
            plan: what is to be found.
            known: recognises this rank's parameters.
            tables: of all ranks.
        """
        rank = own_rank()
        blocks = [
            SharedBlock(name, handles[rank])
            for table in tables
            for name, handles in zip(table.blocks, table.handles, strict=True)
        ]
        first_slots = [0, *accumulate(len(table.blocks) for table in tables)]

        def piece(part: ShardRead) -> BucketPiece:
            assert part.owner is not None, "see consecutive_reads"
            block, shard_start = tables[part.owner].shards[part.read.tensor]
            slot, read = first_slots[part.owner] + block, part.read
            return BucketPiece(slot, shard_start + read.offset, read.start, read.run)

        pairs = enumerate(zip(plan.buckets, plan.reads, strict=True))
        buckets = tuple(
            ReadyBucket(index, bucket, pieces=[piece(part) for part in parts])
            for index, (bucket, parts) in pairs
        )
        return cls(known, tuple(blocks), buckets)

    @cached_property
    def names(self) -> frozenset[str]:
        """Of the blocks."""
        return frozenset(block.name for block in self.blocks)

    def without_handles(self) -> Located:
        """This, once the engines have used the handles; the same object where there are none."""
        if all(block.handle is None for block in self.blocks):
            return self
        return replace(self, blocks=tuple(replace(block, handle=None) for block in self.blocks))

    def is_mappable(self, mapped: frozenset[str]) -> bool:
        """True if every block that is not `mapped` has a handle."""
        return all(block.handle is not None or block.name in mapped for block in self.blocks)


def first_difference(
    name: str, exported: torch.Tensor, traced: TracedExport, shards: Sequence[torch.Tensor]
) -> str | None:
    """What of an exported tensor is not in this rank's shards as traced; None: all of it is."""
    found = traced.tensors.get(name)
    if found is None or (found.dtype, found.shape) != (exported.dtype, tuple(exported.shape)):
        return f"{name} was not traced as it is exported"
    if not exported.numel():
        return None
    flat = exported.detach().contiguous().view(-1).view(torch.uint8)
    everything = Arrangement((Read(0, 0, (), flat.numel(), 0),), flat.numel())
    shard = shards[found.origin.parameter]
    for part in shard_reads(everything, [found.origin], traced.owners):
        if part.owner not in (None, own_rank()):
            continue
        read = part.read
        own = shard[read.offset : read.offset + read.run]
        whole = flat[read.start : read.start + read.run]
        if own.data_ptr() != whole.data_ptr() and not torch.equal(own, whole):
            return f"{name} is exported with other bytes than its parameter has"
    return None
