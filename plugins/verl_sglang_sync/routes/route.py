"""Where a sync's buckets come from, and how a sync does without the full export.

The engines of one sync are loaded from a `SyncSource`: verl's full export, packed
(`export.ExportedBuckets`), or what a `Route` offers, which has learnt from a good exported sync how
to do without: "pull" (`pull.route.Pull`), "exchange" (`exchange.Exchange`) and "send"
(`send.Send`).

The steps of a sync on every trainer rank; which of them are collective, or by which route:

    step                            when                                       collective
    route.choose(export, ...)       the engines have been asked to join        yes
    route.wants_comparison(export)  no route has a source, so it is exported   yes
    source.start()                  while the engines join                     export
    source.delivery(engines)        all have joined                            no
    for bucket in source            then; each bucket is loaded                all but pull
    source.confirm()                all are sent; if it raises, none is served no
    source.drain()                  then, and after any failure                export, exchange
    route.prepare_to_learn(export)  exported: while engines load the rest      no
    route.learn(sync)               all is loaded, if exported                 yes
    source.end()                    the engines serve the new weights          no
    route.recover(cause, export)    a sync by this route has failed            yes

What `choose`, `can_learn`, `wants_comparison`, `learn` and `recover` return is equal on all ranks.

A route's state, which is equal on all ranks, changes like this:

    UNTRIED --learn--> LEARNT --proof--> PROVEN --(a failure, or a change)--> UNTRIED
    any --(an error that may pass)--> RETRY_LATER --(n syncs)--> UNTRIED
    any --(a reason that stays)--> OFF

LEARNT: its next sync is the proof, of the weights that an export has just brought. Only a PROVEN
route brings new weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, TypeAlias

import torch

from sglang_loader.common.ranks import Ranks, Reason
from sglang_loader.common.session.messages import Loaded
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.arrangements import EngineArrangements
from verl_sglang_sync.engine.engine_ranks import EngineRank
from verl_sglang_sync.report import SyncReport, warn_once
from verl_sglang_sync.sources.bucket_cutter import Bucket, BucketCutter
from verl_sglang_sync.sources.comparison import Comparison
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sources.snapshot import sources_of
from verl_sglang_sync.sources.source_map import SourceMap

logger = logging.getLogger(__name__)

NOT_TRACEABLE = (
    "weights are exported in full: the export does not name the parameters that it hands on as "
    "they are (verl's does with FSDP and Megatron-Bridge; not with LoRA, mbridge or fp8, and not "
    "that of an engine class of your own)"
)


@dataclass(frozen=True)
class ReadyBucket:
    """A bucket that can be loaded.

    Attributes:
        index: position in the sync, from 0.
        storage: the staging buffer that holds it; None where it is pulled, or sent.
        pieces: where in that buffer its bytes are, encoded, given its slot in a session; None: from
            the first byte on.
        arranged: it has only what the engine rank reads.
        nbytes: bytes of the bucket, or of what is arranged of it.
    """

    index: int
    bucket: Bucket
    storage: torch.UntypedStorage | None = None
    pieces: Callable[[int], bytes] | None = None
    arranged: bool = False
    nbytes: int = 0


Poll: TypeAlias = Callable[[Callable[[], bool | None]], object]
"""`Ranks.poll` of a sync's ranks."""


class Delivery:
    """How ready buckets get to the engine ranks of one trainer rank, in one sync.

    Both methods raise what a session raises, and name the engine rank.
    """

    def deliver(self, ready: ReadyBucket) -> None:
        """Have the next bucket loaded."""
        raise NotImplementedError

    def make_room(self) -> None:
        """Wait until the next bucket's buffer, if it has one, is free: it was read, or sent."""


class SyncSource:
    """The buckets of one sync of one trainer rank, in the steps of this module's timeline, which do
    nothing by default.

    Attributes:
        is_collective: all ranks take part in each bucket, or none may begin.
        asks_for_arrangements: engines are asked what they read of the buckets, to be sent only that
            later.
        required_arrangements: by engine rank of this rank, the digest of the arrangements that it
            must hold, "" where it gets whole buckets; None: all do.
    """

    is_collective = True
    asks_for_arrangements = True
    required_arrangements: Sequence[str] | None = None

    def start(self) -> None:
        """Prepare the first bucket."""

    def delivery(self, engines: Sequence[EngineRank], poll: Poll) -> Delivery | None:
        """How these buckets get to this rank's engine ranks; None: as packed ones do."""
        return None

    def __iter__(self) -> Iterator[ReadyBucket]:
        raise NotImplementedError

    def confirm(self) -> None:
        """Raise unless what was sent is still what the export would give."""

    def drain(self) -> None:
        """Take part in the collectives that are left, so that no other rank waits for this one."""

    def end(self) -> None:
        """Remember, or report, what the good sync has done."""


@dataclass(frozen=True)
class ExportedSync:
    """A good sync, of which routes learn how the next ones can do without an export.

    Attributes:
        loaded: how this rank's engine ranks have loaded it.
        comparison: of its export with the parameters; None: no route wanted it.
    """

    weights: Iterable[NamedTensor]
    loaded: Sequence[Loaded]
    comparison: Comparison | None


class Recovery(Enum):
    AGAIN = "by the same way"
    EXPORT = "by the full export"


class RouteState(Enum):
    """See the module."""

    UNTRIED = "untried"
    LEARNT = "learnt"
    PROVEN = "proven"
    RETRY_LATER = "retry later"
    OFF = "off"


MAX_DISTANCE = 64
"""Most syncs between two tries of a route that failed for a reason that may pass."""


@dataclass
class RouteContext:
    """What all routes of one trainer rank share.

    Attributes:
        device: of the parameters on this rank, and of what is made of them.
        readers: the arrangements of this rank's engine ranks; the same objects for as long as they
            are the same engine ranks.
        first_reader: engine ranks are numbered from here on. 0: each shares the device of the
            trainer rank of its number; else they have devices of their own, and come and go.
    """

    ranks: Ranks
    device: torch.device
    settings: WeightSyncConfig
    readers: Callable[[], Sequence[EngineArrangements]]
    first_reader: int = 0

    def __post_init__(self) -> None:
        self.source_map = SourceMap(self.ranks, self.device)
        self.cutter = BucketCutter(self.settings.bucket_bytes)

    @property
    def is_colocated(self) -> bool:
        """Each engine rank shares the device of a trainer rank."""
        return self.first_reader == 0


class Route:
    """How syncs are loaded without the full export; of one trainer rank, for all its sessions.

    After a good exported sync a route finds every byte that the engines read (`learn`), and is
    proven by bringing the same weights once more. It stays proven until what it was proven for has
    changed, or a sync fails: then a sync is exported, and it learns again.

    Args:
        is_wanted: False: the route is switched off.

    Attributes:
        fallback_text: what a sync does instead, for the log.
        state: see the module.
        reason: why the route was not learnt from the last exported sync, or None.
    """

    fallback_text: ClassVar[str]

    def __init__(self, context: RouteContext, *, is_wanted: bool) -> None:
        self.state = RouteState.UNTRIED
        self.reason: str | None = None
        self._ranks = context.ranks
        self._device = context.device
        self._source_map = context.source_map
        self._cutter = context.cutter
        self._readers = context.readers
        self._first_reader = context.first_reader
        self._prepared_for: Sequence[EngineArrangements] = ()
        self._is_wanted = is_wanted
        self._num_syncs = 0  # since it was proven, without those that failed
        self._num_short = 0  # how often in a row it was proven, and did not last for one sync
        self._distance = 0  # syncs from the last failure to the next try
        self._num_waited = 0  # of them

    @property
    def is_prepared(self) -> bool:
        """True if a sync may go this way, to prove it or because it is proven."""
        return self.state in (RouteState.LEARNT, RouteState.PROVEN)

    def choose(
        self, weights: Iterable[NamedTensor], report: SyncReport, *, proves: bool = False
    ) -> SyncSource | None:
        """The buckets of this sync without an export; None: it does not go by this route.

        Args:
            proves: the sync is the proof of this route.
        """
        if self.state is not (RouteState.LEARNT if proves else RouteState.PROVEN):
            return None
        source = self._source(weights, report)
        if source is None:
            self.note_outdated()
        return source

    def _source(self, weights: Iterable[NamedTensor], report: SyncReport) -> SyncSource | None:
        """The buckets of a sync by this prepared route, or None if something has changed."""
        raise NotImplementedError

    def begin_sync(self) -> bool:
        """Count a sync; True if this route is to be tried again, for which it must be exported."""
        if self.state is RouteState.RETRY_LATER:
            self._num_waited += 1
            if self._num_waited >= self._distance:
                self.state = RouteState.UNTRIED
                return True
        return False

    def can_learn(self, weights: Iterable[NamedTensor]) -> bool:
        """True if `learn` may prepare this route."""
        if not self._is_wanted or self.state in (RouteState.OFF, RouteState.RETRY_LATER):
            return False
        if sources_of(weights) is None:
            self.reason = NOT_TRACEABLE
            warn_once(NOT_TRACEABLE)
            return False
        return True

    def wants_comparison(self, weights: Iterable[NamedTensor]) -> bool:
        """True if the export should be compared with the parameters while it is loaded, so that
        `learn` need not make another one.
        """
        return False

    def prepare_to_learn(self, weights: Iterable[NamedTensor]) -> None:
        """Do the part of `learn` that needs no other rank; never raises, as `learn` reports it."""

    def learn(self, sync: ExportedSync) -> bool:
        """Prepare the next syncs, so that they bring what this exported one has brought.

        Returns:
            True if the next syncs go this way and need no staging buffers.
        """
        raise NotImplementedError

    def _have_changed(self) -> bool:
        """True if this rank's engine ranks are not those that this route was prepared for."""
        return list(self._readers()) != list(self._prepared_for)

    def _conclude(self, reason: Reason | None) -> bool:
        """End `learn`: the route is prepared, or refused for a reason that is logged."""
        if reason is not None:
            self.refuse(reason)
        else:
            self.state, self.reason = RouteState.LEARNT, None
        return reason is None

    def note_proven(self) -> None:
        """The proof has held: the next syncs may go this way."""
        self.state, self._num_syncs = RouteState.PROVEN, 0

    def note_used(self) -> None:
        """A sync of new weights has gone this way, and is served."""
        self._num_syncs += 1
        self._num_short = self._distance = 0

    def check_replicas(self, weights: Iterable[NamedTensor]) -> None:
        """Raise `WeightSyncError` if one engine would be given parts of different copies of the
        trainer's model; collective.
        """

    def note_unmapped(self) -> None:
        """A session without this route has ended: engines have unmapped what only it needs."""

    def note_outdated(self) -> None:
        """What the route was prepared for has changed: the next sync is exported. If that happens
        at every sync, the way is not worth its preparation.
        """
        is_short = self.state is RouteState.PROVEN and not self._num_syncs
        self.forget()
        self._num_short += is_short
        if self._num_short > 1:
            text = "twice in a row it did not last for one sync: the parameters or engines change"
            self.refuse(Reason(text, is_final=False))

    def refuse_unproven(self, reason: Reason, *, cannot_map: bool) -> None:
        """Do not go this way: its proof has failed, in `cannot_map` because an engine cannot map
        the trainer's memory.
        """
        self.refuse(replace(reason, is_final=reason.is_final or cannot_map))

    def refuse(self, reason: Reason) -> None:
        """Do not go this way, never again or for a number of syncs that grows."""
        self.forget()
        self.reason = reason.text
        if reason.is_final:
            self.state, when = RouteState.OFF, "from now on"
        else:
            self._distance = min(max(1, 2 * self._distance), MAX_DISTANCE)
            self.state, self._num_waited = RouteState.RETRY_LATER, 0
            when = f"tried again in {self._distance} sync{'s' * (self._distance > 1)}"
        logger.warning("weight sync: %s (%s): %s", self.fallback_text, when, reason)

    def recover(self, cause: BaseException | None, weights: Iterable[NamedTensor]) -> Recovery:
        """How a sync by this route that failed, on this rank by `cause`, is made again."""
        self.note_outdated()
        return Recovery.EXPORT

    def forget(self) -> None:
        """Drop what was prepared: the next sync is exported."""
        if self.is_prepared:
            self.state = RouteState.UNTRIED

    def free_scratch(self) -> None:
        """A session is over, good or not: give back the memory that only a sync needs."""
