"""Routes "pull" and "send" in one sync: engines near the trainer read its parameters in place.

An exported sync reports the host of every engine rank. `PullAndSend` then sorts the replicas. A
replica is near if all of its engine ranks can read in place, else far. Near replicas read the
trainer's parameters as with `Pull`, far replicas receive the same buckets as with `Send`.

The near engine ranks are not in the process group in which the trainer ranks send. Near and far
engine ranks therefore wait for each other only at the end of the sync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

from sglang_loader.common.ranks import Reason
from verl_sglang_sync.engine.arrangements import EngineArrangements
from verl_sglang_sync.engine.engine_ranks import EngineRank
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.pull.route import Pull
from verl_sglang_sync.routes.route import (
    Delivery,
    ExportedSync,
    Poll,
    ReadyBucket,
    Recovery,
    RouteContext,
    SyncSource,
)
from verl_sglang_sync.routes.send import Send
from verl_sglang_sync.sources.export import NamedTensor


class PullAndSend(Send):
    """Route "send" for far replicas, with route "pull" for near replicas if there are any.

    Args:
        pull: the route for near replicas, which is part of no other route.
        process_group: see `Send`.
    """

    def __init__(self, context: RouteContext, pull: Pull, process_group: Callable[[], Any]) -> None:
        far, self._all_readers, self._pull = copy(context), context.readers, pull
        far.readers = partial(_far_readers, context)
        super().__init__(far, process_group)

    def _source(self, weights: Iterable[NamedTensor], report: SyncReport) -> SyncSource | None:
        sent = super()._source(weights, report)
        if sent is None or not self._pull.is_prepared:
            return sent
        pulled = self._pull._source(weights, report)
        return pulled and PulledAndSent(pulled, sent)

    def wants_comparison(self, weights: Iterable[NamedTensor]) -> bool:
        return self._pull.wants_comparison(weights)

    def learn(self, sync: ExportedSync) -> bool:
        near = self._near(sync)
        super().learn(_select_engine_ranks(sync, [not is_near for is_near in near]))
        if self.is_prepared and any(near):
            is_pull_prepared = self._pull.prepare(_select_engine_ranks(sync, near))
            if not is_pull_prepared:
                return self.learn(sync)  # `Pull` is refused, so all replicas are far
        return False

    def _near(self, sync: ExportedSync) -> list[bool]:
        """Decide which engine ranks read in place, and mark those of this rank. Collective.

        Returns:
            True or False for each engine rank of all trainer ranks.
        """
        self._pull.forget()
        reasons = self._pull.gather_obstacles(sync.loaded)
        # If all engine ranks could read in place, route "pull" alone has failed before.
        may_pull = any(reasons) and self._pull.can_learn(sync.weights)
        near = [may_pull and reason is None for reason in reasons]
        for reader, is_near in zip(self._all_readers(), near, strict=False):
            reader.reads_in_place = is_near
        return near

    def note_proven(self) -> None:
        super().note_proven()
        if self._pull.is_prepared:
            self._pull.note_proven()

    def note_used(self) -> None:
        super().note_used()
        if self._pull.is_prepared:
            self._pull.note_used()

    def refuse_unproven(self, reason: Reason, *, cannot_map: bool) -> None:
        if not (cannot_map and self._pull.is_prepared):
            super().refuse_unproven(reason, cannot_map=False)
            return
        self.forget()  # the next `learn` prepares this route without `Pull`
        self._pull.refuse(replace(reason, is_final=True))

    def check_replicas(self, weights: Iterable[NamedTensor]) -> None:
        self._pull.check_replicas(weights)

    def note_unmapped(self) -> None:
        super().note_unmapped()
        self._pull.note_unmapped()

    def begin_sync(self) -> bool:
        is_retried = self._pull.begin_sync()
        return super().begin_sync() or is_retried

    def recover(self, cause: BaseException | None, weights: Iterable[NamedTensor]) -> Recovery:
        self._pull.recover(cause, weights)
        # The plan does not hold any more, because the engines get new process groups.
        return super().recover(cause, weights)

    def forget(self) -> None:
        super().forget()
        self._pull.forget()


def _far_readers(context: RouteContext) -> list[EngineArrangements]:
    return [reader for reader in context.readers() if not reader.reads_in_place]


def _select_engine_ranks(sync: ExportedSync, is_selected: Sequence[bool]) -> ExportedSync:
    """Return the sync with the outcomes of the selected engine ranks alone."""
    return replace(sync, loaded=list(compress(sync.loaded, is_selected)))


@dataclass(eq=False)
class PulledAndSent(SyncSource, Delivery):
    """The buckets of one sync, which near engine ranks read in place and far ones receive."""

    _pulled: SyncSource
    _sent: SyncSource

    def __post_init__(self) -> None:
        self.required_arrangements = self._sent.required_arrangements

    def start(self) -> None:
        self._pulled.start()

    def drain(self) -> None:
        self._pulled.drain()
        self._sent.drain()

    def delivery(self, engines: Sequence[EngineRank], poll: Poll) -> Delivery:
        near = [engine for engine in engines if engine.arrangements.reads_in_place]
        far = [engine for engine in engines if not engine.arrangements.reads_in_place]
        pulled, sent = self._pulled.delivery(near, poll), self._sent.delivery(far, poll)
        assert pulled is not None and sent is not None
        self._deliveries = pulled, sent
        return self

    def __iter__(self) -> Iterator[ReadyBucket]:
        return iter(self._sent)

    def deliver(self, ready: ReadyBucket) -> None:
        for delivery in self._deliveries:
            delivery.deliver(ready)

    def confirm(self) -> None:
        self._pulled.confirm()

    def end(self) -> None:
        self._pulled.end()
        self._sent.end()
