"""The sources of a sync's weights, and the route that replaces the full export.

Engines are loaded from a `SyncSource`. The source of an exported sync is verl's full export, packed
(`export.ExportedBuckets`). The source of any other sync is made by a `Route`
(`table.table_route.TableRoute`). The route prepares itself after a good exported sync.

Every trainer rank takes these steps in a sync. The last column names the sources for which a step
is collective:

    step                            when                                       collective
    route.choose(export, ...)       after the request to the engines to join   all, at times
    route.can_learn(export)         if the route has no source                 none
    source.start()                  while the engines join                     export
    source.send(sessions)           after all engines have joined              export, rounds
    source.drain()                  after `send`, or after a failure           export, rounds
                                    between `start` and `drain`, unless a
                                    rank is lost
    source.confirm()                while the engines load. If it raises an    none
                                    error, no engine serves the weights
    route.prepare_to_learn(export)  if exported, while the engines load        none
    route.learn(export)             if exported, after all engines have loaded     all
    source.confirm_unwritten()      when this rank's engines have loaded       none
    source.end()                    when the engines have published            none
    source.close()                  last, after a failure, too                 none
    route.recover(cause, export)    after a failed sync by this route          all

`choose`, `can_learn`, `learn` and `recover` return the same on all ranks.

The state of a route is equal on all ranks, and changes as follows:

    UNTRIED --learn--> LEARNT --proof--> PROVEN --(a failure, or a change)--> UNTRIED
    LEARNT --(a change, a saved load plan was wrong, or an engine cannot map)--> UNTRIED
    any --(an error that may pass)--> RETRY_LATER --(n syncs)--> UNTRIED
    any --(a reason that stays)--> OFF

The first session by a LEARNT route is its proof: it delivers the weights of the last export once
more. Only a PROVEN route delivers new weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Protocol, TypeAlias

import torch

from sglang_loader.common.ranks import Ranks, Reason
from sglang_loader.common.session.messages import Loaded
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.engine_ranks import EngineRank, KnownEngineRank
from verl_sglang_sync.report import SyncReport, warn_once
from verl_sglang_sync.sources.bucket_cutter import Bucket, BucketCutter
from verl_sglang_sync.sources.comparison import Comparison
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sources.snapshot import sources_of
from verl_sglang_sync.sources.source_map import SourceMap

logger = logging.getLogger(__name__)

NOT_TRACEABLE = (
    "weights are exported in full: the export does not name the parameters that it yields "
    "unchanged (verl's export does so with FSDP and with Megatron-Bridge, but not with LoRA or "
    "mbridge, and not in an engine class of your own)"
)


Poll: TypeAlias = Callable[[Callable[[], bool | None]], object]
"""The `Ranks.poll` method of the ranks in a sync."""


class Sending(Protocol):
    """The sessions of a trainer rank, while a source sends.

    Attributes:
        engine_ranks: they have joined. A trainer rank may have none.
    """

    engine_ranks: list[EngineRank]

    def count(self, bucket: Bucket) -> None:
        """Count a bucket whose weights were sent, on every rank."""


class SyncSource:
    """The weights of one sync on one trainer rank.

    The methods are steps of the table at the top of this module. By default a step does nothing.

    Attributes:
        is_collective: `send` takes collectives of all ranks.
    """

    is_collective = True

    def start(self) -> None:
        """Prepare the first bucket."""

    def send(self, sessions: Sending) -> None:
        """Send everything to this rank's engine ranks."""
        raise NotImplementedError

    def confirm(self) -> None:
        """Raise an error if the delivered weights may differ from those that verl would export."""

    def confirm_unwritten(self) -> None:
        """Raise an error if weights were written meanwhile. Called when the engines have loaded."""

    def drain(self) -> None:
        """Take part in the remaining collectives, so that no other rank waits for this rank."""

    def end(self) -> None:
        """Record the results of the good sync for the report and for the next syncs."""

    def close(self) -> None:
        """Free the memory that only a sync needs. The engines have unmapped it."""


@dataclass(frozen=True)
class LoadedExport:
    """An export that all engines have loaded, from which a route prepares the next syncs.

    Attributes:
        weights: the export, which may be iterated once more.
        loaded: the outcome of the load on each of this rank's engine ranks.
        comparison: the comparison of the export with the parameters.
    """

    weights: Iterable[NamedTensor]
    loaded: Sequence[Loaded]
    comparison: Comparison


class Recovery(Enum):
    """The way to repeat a sync that has failed."""

    AGAIN = "by the same way"
    EXPORT = "by the full export"


class RouteState(Enum):
    """The state of a route. The top of this module lists the changes of state."""

    UNTRIED = "untried"
    LEARNT = "learnt"
    PROVEN = "proven"
    RETRY_LATER = "retry later"
    OFF = "off"


MAX_DISTANCE = 64
"""The largest number of syncs between two tries of a route that failed with a passing error."""


@dataclass
class RouteContext:
    """The objects and settings that all routes of one trainer rank share.

    Attributes:
        device: the device of the parameters, staging buffers and scratch on this rank.
        known_ranks: returns this rank's engine ranks. Returns the same objects as long as the
            engine ranks stay the same.
        first_reader: the number of the first engine rank. If 0, the engine rank and the trainer
            rank with the same number share a device. Otherwise engine ranks have devices of their
            own, and the set of engine ranks may change.
    """

    ranks: Ranks
    device: torch.device
    settings: WeightSyncConfig
    known_ranks: Callable[[], Sequence[KnownEngineRank]]
    first_reader: int = 0

    def __post_init__(self) -> None:
        self.source_map = SourceMap(self.ranks, self.device)
        self.cutter = BucketCutter(self.settings.bucket_bytes)

    @property
    def is_colocated(self) -> bool:
        """True if every engine rank shares the device of a trainer rank."""
        return self.first_reader == 0


class Route:
    """A way of one trainer rank to sync without the full export, kept for all syncs.

    Before an exported sync is committed, `learn` finds the places of all bytes that the engines
    read. A proof then delivers the same weights once more by this route. If a sync fails, or the
    engines or the parameters change, the next sync is exported and the route is prepared anew.

    Attributes:
        fallback_text: the consequence for a sync if the route cannot be used, for the log.
        state: the state of the route, see the top of this module.
        reason: the last reason why the route could not be prepared, or was refused. None after a
            good `learn`, and if the next exported sync is sure to be without the obstacle.
    """

    fallback_text: ClassVar[str]

    def __init__(self, context: RouteContext) -> None:
        self.state = RouteState.UNTRIED
        self.reason: str | None = None
        self._ranks = context.ranks
        self._device = context.device
        self._source_map = context.source_map
        self._cutter = context.cutter
        self._known_ranks = context.known_ranks
        self._first_reader = context.first_reader
        self._prepared_for: Sequence[KnownEngineRank] = ()
        self._num_syncs = 0  # good syncs since the proof
        self._num_short = 0  # proofs in a row that no good sync has followed
        self._distance = 0  # syncs from the last failure to the next try
        self._num_waited = 0  # syncs since the last failure

    @property
    def is_prepared(self) -> bool:
        """True if this route may be used, for its proof or for new weights."""
        return self.state in (RouteState.LEARNT, RouteState.PROVEN)

    def choose(
        self, weights: Iterable[NamedTensor], report: SyncReport, *, proves: bool = False
    ) -> SyncSource | None:
        """Create the source of this sync's buckets, without an export.

        Args:
            proves: the sync is the proof of this route.

        Returns:
            The source, or None if this route cannot be used for this sync.
        """
        # A route that is LEARNT serves for its proof alone.
        if self.state is not (RouteState.LEARNT if proves else RouteState.PROVEN):
            return None
        source = self._source(weights, report)
        if source is None:
            self.note_outdated()
        return source

    def _source(self, weights: Iterable[NamedTensor], report: SyncReport) -> SyncSource | None:
        """Create the source of a sync by this prepared route, or return None after a change."""
        raise NotImplementedError

    def begin_sync(self) -> None:
        """Count a sync. If the time to retry the route has come, this sync prepares it again."""
        if self.state is RouteState.RETRY_LATER:
            self._num_waited += 1
            if self._num_waited >= self._distance:
                self.state = RouteState.UNTRIED

    def can_learn(self, weights: Iterable[NamedTensor]) -> bool:
        """Return True if `learn` may prepare this route."""
        if self.state in (RouteState.OFF, RouteState.RETRY_LATER):
            return False
        if sources_of(weights) is None:
            self.reason = NOT_TRACEABLE
            warn_once(NOT_TRACEABLE)
            return False
        return True

    def prepare_to_learn(self, weights: Iterable[NamedTensor]) -> None:
        """Start the part of `learn` that needs no other rank.

        Raises no error. `learn` reports the failures.
        """

    def learn(self, export: LoadedExport) -> None:
        """Prepare this route to deliver the same bytes as the exported sync."""
        raise NotImplementedError

    def _have_changed(self) -> bool:
        """Return True if this rank's engine ranks have changed since `learn`."""
        return list(self._known_ranks()) != list(self._prepared_for)

    def _conclude(self, reason: Reason | None) -> None:
        """End `learn`. If there is a reason, refuse the route."""
        if reason is not None:
            self.refuse(reason)
        else:
            self.state, self.reason = RouteState.LEARNT, None

    def note_proven(self) -> None:
        """Record that the proof has succeeded."""
        self.state, self._num_syncs = RouteState.PROVEN, 0

    def note_used(self) -> None:
        """Record that the engines have published new weights that this route has delivered."""
        self._num_syncs += 1
        self._num_short = self._distance = 0

    def check_copies(self, weights: Iterable[NamedTensor]) -> None:
        """Check that no engine gets parts of different copies of the trainer's model.

        This method is collective.

        Raises:
            WeightSyncError: an engine would get parts of different copies.
        """

    def note_unmapped(self) -> None:
        """Record that the engines have unmapped the memory that only this route needs.

        A session that does not use this route ends so.
        """

    def note_outdated(self) -> None:
        """Record that the engines or the parameters have changed since `learn`."""
        is_short = self.state is RouteState.PROVEN and not self._num_syncs
        self.forget()
        self._num_short += is_short
        # A route that changes at every sync is not worth its preparation.
        if is_short and self._num_short > 1:
            text = "the parameters or the engines changed twice in a row before the first use"
            self.refuse(Reason(text, is_final=False))

    def refuse_unproven(self, reason: Reason, *, cannot_map: bool) -> None:
        """Refuse the route after a failed proof.

        Args:
            cannot_map: the proof failed because an engine cannot map the trainer's memory.
        """
        self.refuse(replace(reason, is_final=reason.is_final or cannot_map))

    def refuse(self, reason: Reason) -> None:
        """Switch the route off: for good if the reason is final, else for some syncs.

        The number of syncs doubles with each failure in a row.
        """
        self.forget()
        self.reason = reason.text
        if reason.is_final:
            self.state, period = RouteState.OFF, "from now on"
        else:
            self._distance = min(max(1, 2 * self._distance), MAX_DISTANCE)
            self.state, self._num_waited = RouteState.RETRY_LATER, 0
            period = f"tried again in {self._distance} sync{'s' * (self._distance > 1)}"
        logger.warning("weight sync: %s (%s): %s", self.fallback_text, period, reason)

    def recover(self, cause: BaseException | None, weights: Iterable[NamedTensor]) -> Recovery:
        """Decide how to repeat a failed sync by this route.

        Args:
            cause: the error of this rank, or None if only other ranks have failed.
        """
        self.note_outdated()
        return Recovery.EXPORT

    def forget(self) -> None:
        """Drop the preparation of this route. The next sync is exported."""
        if self.is_prepared:
            self.state = RouteState.UNTRIED
