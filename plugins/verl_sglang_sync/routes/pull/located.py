"""Where all ranks' parameters are, as this rank's engine ranks are told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from sglang_loader.common.session.messages import BucketPiece
from verl_sglang_sync.engine.session import SharedBlock
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
class Reader:
    """Where one engine rank finds every bucket.

    Attributes:
        blocks: of all trainer ranks; the engine maps them with the first bucket.
        pieces: by bucket; a slot is a position in `blocks`.
    """

    blocks: tuple[SharedBlock, ...]
    pieces: tuple[list[BucketPiece], ...]

    @classmethod
    def of(cls, plan: PullPlan, tables: Sequence[MemoryTable], handle: int, number: int) -> Reader:
        """Where an engine rank finds every bucket.

        Args:
            plan: what is to be found.
            tables: of all trainer ranks.
            handle: which of each block's handles is its own.
            number: of the engine rank, see `RouteContext.first_reader`.
        """
        blocks = [
            SharedBlock(name, handles[handle])
            for table in tables
            for name, handles in zip(table.blocks, table.handles, strict=True)
        ]
        first_slots = [0, *accumulate(len(table.blocks) for table in tables)]

        def place(owner: int, parameter: int) -> tuple[int, int]:
            block, shard_start = tables[owner].shards[parameter]
            return first_slots[owner] + block, shard_start

        def piece(part: ShardRead | SpreadRead) -> BucketPiece:
            if isinstance(part, ShardRead):
                (slot, offset), read = place(part.owner(number), part.read.tensor), part.read
                return BucketPiece(slot, offset + read.offset, read.start, read.run)
            parameter, source = part.origin.parameter, part.origin.bytes
            owners, shards = plan.traced.owners[parameter], []
            for shard in range(len(owners.starts)):
                start, stop = owners.range_of(shard)
                slot, offset = place(owners.owner_of(shard, number), parameter)
                shards.append((slot, offset, stop - start))
            slot = shards[0][0]
            return BucketPiece(
                slot, source.offset, part.start, source.nbytes, source.dims, tuple(shards)
            )

        return cls(tuple(blocks), tuple([piece(part) for part in parts] for parts in plan.reads))


@dataclass(frozen=True)
class Located:
    """Where all ranks' parameters are at present.

    Attributes:
        known: recognises this rank's parameters.
        names: of the blocks of all ranks in which they lie.
        without_handles: the blocks of which there are none: engines must have them mapped.
        readers: this rank's engine ranks.
    """

    known: KnownSources
    names: frozenset[str]
    without_handles: frozenset[str]
    readers: tuple[Reader, ...]

    @classmethod
    def of(
        cls,
        plan: PullPlan,
        known: KnownSources,
        tables: Sequence[MemoryTable],
        readers: Sequence[int],
        first_reader: int,
    ) -> Located:
        """Where this rank's engine ranks find every bucket.

        Args:
            plan: what is to be found.
            known: recognises this rank's parameters.
            tables: of all ranks.
            readers: this rank's engine ranks, among all.
            first_reader: see `RouteContext`.
        """
        blocks = [
            block for table in tables for block in zip(table.blocks, table.handles, strict=True)
        ]
        return cls(
            known,
            frozenset(name for name, _ in blocks),
            frozenset(name for name, handles in blocks if None in handles),
            tuple(Reader.of(plan, tables, reader, first_reader + reader) for reader in readers),
        )

    def used(self) -> Located:
        """This, once the engines have used the handles; the same object where there were none."""
        if self.without_handles == self.names:
            return self
        readers = tuple(
            replace(reader, blocks=tuple(replace(block, handle=None) for block in reader.blocks))
            for reader in self.readers
        )
        return replace(self, without_handles=self.names, readers=readers)
