"""Route "pull": every engine rank reads the trainer ranks' parameters where they are.

Nothing is exported, gathered, packed or sent: an engine rank maps the parameters' memory, that of
its own trainer rank and that of all others on the node, and its load plan copies from there what it
needs. The export is traced once (which bytes of which shard is each tensor?), each rank tells the
others where its shards lie, and each compares its own shards with the full export, bit for bit:

    pull.learn(export, loaded)                    # after a good exported sync
    source = pull.choose(export, report)          # in the next ones
    pull.recover(cause, export)                   # after one that failed

An optimizer changes what is in the memory, and all of this stays true. Parameters that come back
elsewhere (`param_offload`) are located anew before each sync; the trace stays. Whatever else
changes is noticed before the engines may publish, and the sync is made again.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from sglang_loader.common.session.messages import Loaded
from sglang_loader.common.shared_memory import BufferHandle
from verl_sglang_sync.collective import (
    TrainerGroup,
    common_reason,
    holds_everywhere,
    own_rank,
    world_size,
)
from verl_sglang_sync.engine.session import (
    BlockNotMapped,
    EngineCannotMap,
    SharedBlock,
    TrainerSession,
)
from verl_sglang_sync.report import SyncReport, warn_once
from verl_sglang_sync.routes.pull.located import (
    Located,
    PulledBucket,
    PullPlan,
    first_difference,
)
from verl_sglang_sync.routes.route import ReadyBucket, Recovery
from verl_sglang_sync.sources.bucket_stream import Bucket, BucketStream, Cut
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sources.export_trace import NotTraceable
from verl_sglang_sync.sources.known_sources import (
    KnownSources,
    SourcesChanged,
    empties_storages,
    require_sources,
    sources_of,
)
from verl_sglang_sync.sources.memory_blocks import BlockNames
from verl_sglang_sync.sources.shard_memory import (
    LocatedShards,
    MemoryTable,
    bucket_reads,
    locate,
)
from verl_sglang_sync.sources.source_map import SourceMap

logger = logging.getLogger(__name__)

NOT_IN_PLACE = "the engines do not read the trainer's parameters in place"


class Pull:
    """A `Route`.

    Args:
        group: the trainer's ranks.
        device: of the engine on this rank, and of the parameters.
        source_map: of the export.
        stream: its buckets.
        is_wanted: False: never pull.
        record: notes a handle before it leaves this process.
        recheck_every_n_syncs: go through the export, and compare, in every n-th sync; 0: never.
    """

    def __init__(
        self,
        group: TrainerGroup,
        device: torch.device,
        source_map: SourceMap,
        stream: BucketStream,
        *,
        is_wanted: bool,
        record: Callable[[BufferHandle], None],
        recheck_every_n_syncs: int = 0,
    ) -> None:
        self._group = group
        self._device = device
        self._source_map = source_map
        self._stream = stream
        self._is_wanted = is_wanted
        self._record = record
        self._recheck_every_n_syncs = recheck_every_n_syncs
        self._names = BlockNames()
        self._plan: PullPlan | None = None
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

    def choose(self, weights: Iterable[NamedTensor], report: SyncReport) -> PulledBuckets | None:
        """See `Route`."""
        if self._located is None:
            return None
        self._num_syncs += 1
        every = self._recheck_every_n_syncs
        if every and self._num_syncs % every == 0:
            return None
        reason = None
        if empties_storages(weights) or not self._located.is_mappable(self._mapped):
            reason = self._locate(weights)
        if reason is not None:
            warn_once(f"{NOT_IN_PLACE} in a sync: {reason}")
            return None
        return PulledBuckets(self, weights, self._stream, self._device, report)

    def can_learn(self, weights: Iterable[NamedTensor]) -> bool:
        """See `Route`."""
        if self._is_wanted and sources_of(weights) is None:
            warn_once(
                f"{NOT_IN_PLACE}: the export does not name those that it hands on as they are "
                "(verl's does with FSDP2, and with Megatron-Bridge; not with adapters or "
                "quantisation)"
            )
            return False
        return self._is_wanted and self.off is None

    def learn(self, weights: Iterable[NamedTensor], loaded: Loaded) -> bool:
        """Trace, locate and compare; see `Route`."""
        if not holds_everywhere(self._group, loaded.may_read_in_place):
            warn_once(f"{NOT_IN_PLACE}: an engine has no load plan that leaves them as they are")
            return False
        buckets = tuple(cut.bucket for cut in self._stream.cuts)
        reason = self._make_plan(weights, buckets)
        may_share = not empties_storages(weights)
        reason = reason or self._locate(weights, self._compare_with_export, may_share=may_share)
        if reason is not None:
            self._switch_off(reason)
        return reason is None

    @property
    def blocks(self) -> tuple[SharedBlock, ...]:
        """What the engine has to map."""
        assert self._located is not None, "see choose"
        return self._located.blocks

    def buckets(self, report: SyncReport) -> Iterator[PulledBucket]:
        """The buckets of a sync that is pulled.

        Args:
            report: gets the counts.
        """
        assert self._located is not None, "see choose"
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
        assert self._located is not None, "see choose"
        if [cut.bucket for cut in cuts] != [pulled.bucket for pulled in self._located.buckets]:
            raise SourcesChanged("the export is cut into other buckets")
        yield from self._located.known.checks(require_sources(weights))

    def end(self) -> None:
        """After a good sync: the engines have mapped what they were to map."""
        assert self._located is not None, "see choose"
        names = self._located.names
        self._mapped, self._used = names if self.keeps_mappings else frozenset(), names
        self._located = self._located.without_handles()

    def recover(self, cause: Exception | None, weights: Iterable[NamedTensor]) -> Recovery:
        """See `Route`."""
        cannot_map = str(cause) if isinstance(cause, EngineCannotMap) else None
        is_known = cannot_map or isinstance(cause, SourcesChanged | BlockNotMapped)
        self.forget()
        if not holds_everywhere(self._group, cause is None or bool(is_known)):
            return Recovery.RAISE
        if (agreed := common_reason(self._group, cannot_map)) is not None:
            self._switch_off(agreed)
            return Recovery.EXPORT
        reason = self._locate(weights, may_share=not empties_storages(weights))
        return Recovery.AGAIN if reason is None else Recovery.EXPORT

    def forget(self) -> None:
        """The next sync is exported; what the engines have mapped is not known any more."""
        self._located, self._mapped = None, frozenset()

    def rest(self) -> None:
        """Nothing to do: no memory was needed."""

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
            reads = tuple(bucket_reads(bucket.layout, traced, rank) for bucket in buckets)
            self._plan = PullPlan(traced, buckets, reads)
        except NotTraceable as error:
            reason = str(error)
        except Exception:
            reason = traceback.format_exc()
        return common_reason(self._group, reason)

    def _locate(
        self,
        weights: Iterable[NamedTensor],
        check: Callable[[Iterable[NamedTensor], LocatedShards], str | None] | None = None,
        *,
        may_share: bool = True,
    ) -> str | None:
        """Find all ranks' parameters where they are now; collective.

        Args:
            weights: the export.
            check: what else must hold, also collective.
            may_share: False: make no handles, whose memory lives until an engine has used them;
                they are located again before the next sync.

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
            shards = locate(self._plan.traced, now, self._device, own_rank())
            if empties_storages(weights):  # the names of what was there before say nothing now
                self._names = BlockNames()
            num_readers = world_size() if may_share else 0
            table = shards.share(self._names, self._mapped, num_readers, self._record)
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
            self._located = Located.of(self._plan, known, [each for each in tables if each])
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
                problem = problem or first_difference(name, exported, traced, located)
            except Exception:
                problem = problem or traceback.format_exc()
        if seen != traced.tensors.keys():
            problem = problem or f"{len(seen)} tensors were exported, {len(traced.tensors)} traced"
        return problem

    def _switch_off(self, reason: str) -> None:
        self._plan = self._located = None
        self.off = reason
        logger.warning("%s: %s", NOT_IN_PLACE, reason)


class PulledBuckets:
    """Buckets that lie in the trainer ranks' parameters.

    Args:
        pull: has located the parameters.
        weights: the export that is left out.
        stream: how it would have been cut.
        device: of the parameters on this rank.
        report: gets the counts and seconds.
    """

    is_packed = False
    needs_arrangements = None

    def __init__(
        self,
        pull: Pull,
        weights: Iterable[NamedTensor],
        stream: BucketStream,
        device: torch.device,
        report: SyncReport,
    ) -> None:
        self._pull = pull
        self._device = device
        self._report = report
        self._checks = pull.confirm(weights, stream.cuts)

    def start(self, has_arrived: Callable[[], bool]) -> None:
        """Wait for what still writes the parameters: once all ranks have, any engine may read."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._check(until=has_arrived)

    def engine_joined(self, held: str) -> None:
        """Nothing to do: what an engine does not need it does not read."""

    def __iter__(self) -> Iterator[ReadyBucket]:
        for index, pulled in enumerate(self._pull.buckets(self._report)):
            yield ReadyBucket(index, pulled.bucket, pieces=pulled.pieces)

    def confirm(self) -> None:
        """The parameters are where the engines were told to read them."""
        self._check()

    def drain(self) -> None:
        """Nothing to do: no rank waits for an export."""

    def map_memory(self, session: TrainerSession) -> None:
        """The parameters of all ranks."""
        session.map_blocks(self._pull.blocks, keep=self._pull.keeps_mappings)

    def end(self) -> None:
        """The engines have mapped what they were to map."""
        self._pull.end()

    def _check(self, until: Callable[[], bool] = lambda: False) -> None:
        with self._report.stage("confirm"):
            for _ in self._checks:
                if until():
                    break
