"""What a sync's buckets come from, and how a sync is spared the full export.

The engines of one sync are loaded from a `SyncSource`: verl's full export, packed
(`export.ExportedBuckets`), or what a `Route` offers, which has learnt from a good exported sync how
to do without: "pull" (`pull.Pull`) and "exchange" (`exchange.route.Exchange`).

A source is chosen before the engine has joined, the same on all ranks, and used in this order:

    source.start(session.has_arrived)           # while the engine joins
    source.engine_joined(session.arrangements)  # the engine has said how buckets may come
    source.map_memory(session)                  # what the engine reads, where that is known
    for bucket in source: ...                   # each is loaded
    source.confirm()                            # before the engines may publish
    source.drain()                              # in any case: no other rank waits for this one
    source.end()                                # after a good sync
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from sglang_loader.common.session.messages import BucketPiece, Loaded
from verl_sglang_sync.engine.session import TrainerSession
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.sources.bucket_stream import Bucket
from verl_sglang_sync.sources.export import NamedTensor


@dataclass(frozen=True)
class ReadyBucket:
    """A bucket that can be loaded.

    Attributes:
        index: position in the sync, from 0.
        bucket: what it is.
        storage: the staging buffer that holds it; None where it is pulled.
        arranged: digest of the arrangements by which it is packed; "": it is whole.
        nbytes: of what is packed.
        pieces: where the trainer ranks' parameters hold it; None where it is packed.
    """

    index: int
    bucket: Bucket
    storage: torch.UntypedStorage | None = None
    arranged: str = ""
    nbytes: int = 0
    pieces: list[BucketPiece] | None = None


class SyncSource(Protocol):
    """The buckets of one sync of one trainer rank; see the module.

    Attributes:
        is_packed: True: buckets lie in staging buffers, and may hold only what the engine reads.
        needs_arrangements: digest of those that every rank's engine must hold; None: none must.
    """

    is_packed: bool

    @property
    def needs_arrangements(self) -> str | None: ...

    def start(self, has_arrived: Callable[[], bool]) -> None:
        """Do what can be done while the engine joins, until it has."""

    def engine_joined(self, held: str) -> None:
        """The engine holds arrangements of this digest for the sync; "": none."""

    def map_memory(self, session: TrainerSession) -> None:
        """Have the engine map, with the first bucket, what all buckets need."""

    def __iter__(self) -> Iterator[ReadyBucket]: ...

    def confirm(self) -> None:
        """Raise unless the buckets are what the export gives."""

    def drain(self) -> None:
        """Take part in what other ranks still need."""

    def end(self) -> None:
        """The sync was good."""


class Recovery(Enum):
    """What all ranks do after a sync by a route that failed."""

    RAISE = "something else went wrong"
    AGAIN = "by the same route"
    EXPORT = "by the full export"


class Route(Protocol):
    """How syncs are loaded without the full export; of one trainer rank, for all its sessions.

    `choose`, `learn` and `recover` are collective; what they say is equal on all ranks.
    """

    def choose(self, weights: Iterable[NamedTensor], report: SyncReport) -> SyncSource | None:
        """The buckets of this sync; None: it goes another way.

        Args:
            weights: the export that would be left out.
            report: gets the counts and seconds.
        """

    def can_learn(self, weights: Iterable[NamedTensor]) -> bool:
        """True if `learn` may find something; equal on all ranks, whose exports are of a kind."""

    def learn(self, weights: Iterable[NamedTensor], loaded: Loaded) -> bool:
        """After a good exported sync: prepare, and prove, the next ones.

        Args:
            weights: the export of that sync.
            loaded: how this rank's engine has loaded it.

        Returns:
            True if the next syncs go this way and need no staging buffers.
        """

    def recover(self, cause: Exception | None, weights: Iterable[NamedTensor]) -> Recovery:
        """What to do after a sync by this route that failed.

        Args:
            cause: what went wrong on this rank; None: nothing.
            weights: the export that was left out.
        """

    def forget(self) -> None:
        """A sync has failed for good: the next one is exported."""

    def rest(self) -> None:
        """A session is over, good or not: give back the memory that only a sync needs."""
