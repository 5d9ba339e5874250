"""Route "pull": every engine rank reads the trainer ranks' parameters where they are.

Nothing is exported, gathered, packed or sent: an engine rank maps the parameters' memory, that of
its own trainer rank and that of all others on the node, and its load plan copies from there what it
needs. The export is traced once (which bytes of which shard is each tensor?), each rank tells the
others where its shards lie, and each compares its own shards with the full export, bit for bit:

    pull.learn(export, cuts, may_read=loaded.may_read_in_place)   # after a good exported sync
    if pull.prepare(export):                                      # in the next ones
        for bucket in pull.buckets(report): ...                   # the engines read
        for _ in pull.confirm(export, cuts): ...                  # meanwhile; before they commit
    pull.recover(cause, export)                                   # after one that failed

An optimizer changes what is in the memory, and all of this stays true. Parameters that come back
elsewhere (`param_offload`) are located anew before each sync; the trace stays. Whatever else
changes is noticed by `confirm`, and the sync is made again. `learn`, `prepare` and `recover` are
collective.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate

import torch

from sglang_loader.common.regions.arrangement import Arrangement, Read
from sglang_loader.common.session.messages import BucketPiece
from sglang_loader.common.shared_memory import BufferHandle
from verl_sglang_sync.collective import (
    TrainerGroup,
    common_reason,
    holds_everywhere,
    own_rank,
    world_size,
)
from verl_sglang_sync.engine.session import BlockNotMapped, EngineCannotMap, SharedBlock
from verl_sglang_sync.report import SyncReport, warn_once
from verl_sglang_sync.sources.bucket_stream import Bucket, Cut
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sources.export_trace import NotTraceable, TracedExport
from verl_sglang_sync.sources.known_sources import (
    KnownSources,
    SourcesChanged,
    require_sources,
    sources_of,
)
from verl_sglang_sync.sources.memory_blocks import BlockNames
from verl_sglang_sync.sources.shard_memory import (
    LocatedShards,
    MemoryTable,
    consecutive_reads,
    locate,
)
from verl_sglang_sync.sources.source_map import SourceMap
from verl_sglang_sync.sources.transfer_plan import ShardRead, shard_reads

logger = logging.getLogger(__name__)

NOT_IN_PLACE = "the engines do not read the trainer's parameters in place"


class Recovery(Enum):
    """What all ranks do after a pulled sync that failed."""

    RAISE = "something else went wrong"
    PULL = "pull again, from where the parameters are now"
    EXPORT = "export in full"


@dataclass(frozen=True)
class PulledBucket:
    """A bucket that lies in the trainer ranks' parameters.

    Attributes:
        bucket: what it is.
        pieces: where; a slot is a position in `Located.blocks`.
    """

    bucket: Bucket
    pieces: list[BucketPiece]


@dataclass(frozen=True)
class _Plan:
    """Which bytes of which shards the buckets are; true until the parameters are replaced.

    Attributes:
        traced: what it was made of.
        buckets: of the export.
        reads: by bucket.
    """

    traced: TracedExport
    buckets: tuple[Bucket, ...]
    reads: tuple[list[ShardRead], ...]


@dataclass(frozen=True)
class Located:
    """Where all ranks' parameters are at present.

    Attributes:
        known: recognises this rank's parameters.
        blocks: of all ranks; the engine maps them with the first bucket.
        buckets: in those blocks.
    """

    known: KnownSources
    blocks: tuple[SharedBlock, ...]
    buckets: tuple[PulledBucket, ...]

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


class Pull:
    """Of one trainer rank, for all its sessions.

    Args:
        group: the trainer's ranks.
        device: of the engine on this rank, and of the parameters.
        source_map: of the export.
        is_wanted: False: never pull.
        record: notes a handle before it leaves this process.
        recheck_every_n_syncs: go through the export, and compare, in every n-th sync; 0: never.
    """

    def __init__(
        self,
        group: TrainerGroup,
        device: torch.device,
        source_map: SourceMap,
        *,
        is_wanted: bool,
        record: Callable[[BufferHandle], None],
        recheck_every_n_syncs: int = 0,
    ) -> None:
        self._group = group
        self._device = device
        self._source_map = source_map
        self._is_wanted = is_wanted
        self._record = record
        self._recheck_every_n_syncs = recheck_every_n_syncs
        self._names = BlockNames()
        self._plan: _Plan | None = None
        self._located: Located | None = None
        self._used: frozenset[str] = frozenset()  # blocks that the last pulled sync read
        self._mapped: frozenset[str] = frozenset()  # those of them that the engines keep mapped
        self._num_syncs = 0
        self.off: str | None = None

    @property
    def keeps_mappings(self) -> bool:
        """True if engines are to keep the parameters mapped after this sync.

        Only where they lay in the same blocks in the one before: what is mapped elsewhere cannot be
        freed, and a trainer that offloads its parameters must free it.
        """
        return self._located is not None and self._located.names == self._used

    def can_learn(self, weights: Iterable[NamedTensor]) -> bool:
        """True if `learn` may find something; equal on all ranks, whose exports are of a kind."""
        return self._is_wanted and self.off is None and sources_of(weights) is not None

    def learn(self, weights: Iterable[NamedTensor], cuts: Sequence[Cut], *, may_read: bool) -> bool:
        """Trace, locate and compare, so that the next syncs pull; collective.

        Args:
            weights: the export of the sync before.
            cuts: its buckets.
            may_read: this rank's engine has a plan that leaves what it reads as it is.

        Returns:
            True if the next syncs pull; equal on all ranks.
        """
        if not holds_everywhere(self._group, may_read):
            warn_once(f"{NOT_IN_PLACE}: an engine has no load plan that leaves them as they are")
            return False
        buckets = tuple(cut.bucket for cut in cuts)
        reason = self._make_plan(weights, buckets)
        reason = reason or self._locate(weights, self._compare_with_export)
        if reason is not None:
            self._switch_off(reason)
        return reason is None

    def prepare(self, weights: Iterable[NamedTensor]) -> bool:
        """True if this sync is to be pulled; equal on all ranks."""
        if self._located is None:
            return False
        self._num_syncs += 1
        every = self._recheck_every_n_syncs
        if every and self._num_syncs % every == 0:
            return False
        if self._located.is_mappable(self._mapped):
            return True
        if (reason := self._locate(weights)) is not None:
            warn_once(f"{NOT_IN_PLACE} in a sync: {reason}")
        return reason is None

    @property
    def blocks(self) -> tuple[SharedBlock, ...]:
        """What the engine has to map."""
        assert self._located is not None, "see prepare"
        return self._located.blocks

    def buckets(self, report: SyncReport) -> Iterator[PulledBucket]:
        """The buckets of a sync that is pulled.

        Args:
            report: gets the counts.
        """
        assert self._located is not None, "see prepare"
        for pulled in self._located.buckets:
            report.count_bucket(len(pulled.bucket.layout.tensors), pulled.bucket.payload_bytes)
            report.num_pulled += 1
            yield pulled

    def confirm(self, weights: Iterable[NamedTensor], cuts: Sequence[Cut]) -> Iterator[None]:
        """Check that the parameters are still what and where they were when they were traced.

        In small steps, for moments in which the engine is waited for; nothing is confirmed before
        the last is taken.

        Args:
            weights: the export that is left out.
            cuts: how it would have been cut.

        Raises:
            SourcesChanged: it may be something else.
        """
        assert self._located is not None, "see prepare"
        if [cut.bucket for cut in cuts] != [pulled.bucket for pulled in self._located.buckets]:
            raise SourcesChanged("the export is cut into other buckets")
        yield from self._located.known.checks(require_sources(weights))

    def end(self) -> None:
        """After a good sync: the engines have mapped what they were to map."""
        assert self._located is not None, "see prepare"
        names = self._located.names
        self._mapped, self._used = names if self.keeps_mappings else frozenset(), names
        self._located = self._located.without_handles()

    def recover(self, cause: Exception | None, weights: Iterable[NamedTensor]) -> Recovery:
        """What to do after a pulled sync that failed, the same on all ranks; collective.

        Args:
            cause: what went wrong on this rank; None: nothing.
            weights: the export that was left out.
        """
        cannot_map = str(cause) if isinstance(cause, EngineCannotMap) else None
        is_known = cannot_map or isinstance(cause, SourcesChanged | BlockNotMapped)
        self.forget()
        if not holds_everywhere(self._group, cause is None or bool(is_known)):
            return Recovery.RAISE
        if (agreed := common_reason(self._group, cannot_map)) is not None:
            self._switch_off(agreed)
            return Recovery.EXPORT
        return Recovery.PULL if self._locate(weights) is None else Recovery.EXPORT

    def forget(self) -> None:
        """The next sync is exported; what the engines have mapped is not known any more."""
        self._located, self._mapped = None, frozenset()

    def _make_plan(self, weights: Iterable[NamedTensor], buckets: tuple[Bucket, ...]) -> str | None:
        """Find the buckets' bytes in the shards, unless that is known; collective.

        Returns:
            Why some are not there, equal on all ranks; None: all are.
        """
        if (reason := self._source_map.trace(weights)) is not None:
            return reason
        traced, plan = self._source_map.traced, self._plan
        is_known = plan is not None and plan.traced is traced and plan.buckets == buckets
        if holds_everywhere(self._group, is_known):
            return None
        self._plan = None
        try:
            rank = own_rank()
            reads = tuple(consecutive_reads(bucket.layout, traced, rank) for bucket in buckets)
            self._plan = _Plan(traced, buckets, reads)
        except NotTraceable as error:
            reason = str(error)
        except Exception:
            reason = traceback.format_exc()
        return common_reason(self._group, reason)

    def _locate(
        self,
        weights: Iterable[NamedTensor],
        check: Callable[[Iterable[NamedTensor], LocatedShards], str | None] | None = None,
    ) -> str | None:
        """Find all ranks' parameters where they are now; collective.

        Args:
            weights: the export.
            check: what else must hold, also collective.

        Returns:
            Why they cannot be read there, equal on all ranks; None if they can.
        """
        self._located = None
        shards: LocatedShards | None = None
        known: KnownSources | None = None
        table: MemoryTable | None = None
        reason = None
        try:
            assert self._plan is not None, "nothing was traced"
            now = self._source_map.current(weights, self._plan.traced)
            known = KnownSources(now, require_sources(weights))
            shards = locate(self._plan.traced.names, now, self._device)
            table = shards.share(self._names, self._mapped, world_size(), self._record)
        except (NotTraceable, SourcesChanged) as error:
            reason = str(error)
        except Exception:
            reason = traceback.format_exc()
        tables: list[MemoryTable | None] = self._group.all_gather(table)
        if reason is None and len({each.host for each in tables if each is not None}) > 1:
            reason = "the trainer's ranks are on several nodes"
        agreed = common_reason(self._group, reason)
        if agreed is None and check is not None:
            assert shards is not None
            agreed = common_reason(self._group, check(weights, shards))
        if agreed is None:
            assert self._plan is not None and known is not None
            self._located = _located(self._plan, known, [each for each in tables if each])
        return agreed

    def _compare_with_export(
        self, weights: Iterable[NamedTensor], located: LocatedShards
    ) -> str | None:
        """Go through the export, and compare this rank's shards with it; collective.

        Returns:
            The first difference on this rank; None if there is none.
        """
        assert self._plan is not None
        traced, problem, seen = self._plan.traced, None, set()
        for name, exported in weights:  # to the end: the other ranks need this one's shards
            try:
                seen.add(name)
                problem = problem or _difference(name, exported, traced, located)
            except Exception:
                problem = problem or traceback.format_exc()
        if seen != traced.tensors.keys():
            problem = problem or f"{len(seen)} tensors were exported, {len(traced.tensors)} traced"
        return problem

    def _switch_off(self, reason: str) -> None:
        self._plan = self._located = None
        self.off = reason
        logger.warning("%s: %s", NOT_IN_PLACE, reason)


def _located(plan: _Plan, known: KnownSources, tables: Sequence[MemoryTable]) -> Located:
    """Where this rank's engine finds every bucket.

    Args:
        plan: what is to be found.
        known: recognises this rank's parameters.
        tables: of all ranks.
    """
    rank = own_rank()
    blocks = [
        SharedBlock(name, handle)
        for table in tables
        for name, handle in zip(table.blocks, table.handles[rank], strict=True)
    ]
    first_slots = [0, *accumulate(len(table.blocks) for table in tables)]

    def piece(part: ShardRead) -> BucketPiece:
        assert part.owner is not None, "see consecutive_reads"
        block, shard_start = tables[part.owner].shards[part.read.tensor]
        slot, read = first_slots[part.owner] + block, part.read
        return BucketPiece(slot, shard_start + read.offset, read.start, read.run)

    buckets = tuple(
        PulledBucket(bucket, [piece(part) for part in parts])
        for bucket, parts in zip(plan.buckets, plan.reads, strict=True)
    )
    return Located(known, tuple(blocks), buckets)


def _difference(
    name: str, exported: torch.Tensor, traced: TracedExport, located: LocatedShards
) -> str | None:
    """What of an exported tensor is not in this rank's shards as traced; None: all of it is."""
    found = traced.tensors.get(name)
    if found is None or (found.dtype, found.shape) != (exported.dtype, tuple(exported.shape)):
        return f"{name} was not traced as it is exported"
    if not exported.numel():
        return None
    flat = exported.detach().contiguous().view(-1).view(torch.uint8)
    everything = Arrangement((Read(0, 0, (), flat.numel(), 0),), flat.numel())
    shard = located.shards[found.origin.parameter]
    for part in shard_reads(everything, [found.origin], traced.owners):
        if part.owner not in (None, own_rank()):
            continue
        read = part.read
        own = shard[read.offset : read.offset + read.run]
        whole = flat[read.start : read.start + read.run]
        if own.data_ptr() != whole.data_ptr() and not torch.equal(own, whole):
            return f"{name} is exported with other bytes than its parameter has"
    return None
