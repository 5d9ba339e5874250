"""Where all ranks' parameters are, as the engine rank on this device is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from sglang_loader.common.session.messages import BucketPiece
from verl_sglang_sync.collective import own_rank
from verl_sglang_sync.engine.session import SharedBlock
from verl_sglang_sync.routes.route import ReadyBucket
from verl_sglang_sync.sources.bucket_stream import Bucket
from verl_sglang_sync.sources.export_trace import TracedExport
from verl_sglang_sync.sources.known_sources import KnownSources
from verl_sglang_sync.sources.shard_memory import MemoryTable, SpreadRead, bucket_reads
from verl_sglang_sync.sources.transfer_plan import ShardRead


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
    reads: list[list[ShardRead | SpreadRead]]

    @classmethod
    def of(cls, traced: TracedExport, buckets: list[Bucket]) -> PullPlan:
        """Find the buckets' bytes.

        Args:
            traced: the export.
            buckets: of it.

        Raises:
            NotTraceable: a tensor was not traced.
        """
        return cls(traced, buckets, [bucket_reads(b.layout, traced) for b in buckets])

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

        def place(owner: int, parameter: int) -> tuple[int, int]:
            block, shard_start = tables[owner].shards[parameter]
            return first_slots[owner] + block, shard_start

        def piece(part: ShardRead | SpreadRead) -> BucketPiece:
            if isinstance(part, ShardRead):
                (slot, offset), read = place(part.owner(rank), part.read.tensor), part.read
                return BucketPiece(slot, offset + read.offset, read.start, read.run)
            parameter, source = part.origin.parameter, part.origin.bytes
            owners, shards = plan.traced.owners[parameter], []
            for shard in range(len(owners.starts)):
                start, stop = owners.range_of(shard)
                slot, offset = place(owners.owner_of(shard, rank), parameter)
                shards.append((slot, offset, stop - start))
            slot = shards[0][0]
            return BucketPiece(
                slot, source.offset, part.start, source.nbytes, source.dims, tuple(shards)
            )

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
