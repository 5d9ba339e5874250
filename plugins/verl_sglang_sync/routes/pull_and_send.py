"""Routes "pull" and "send" in one sync: engines near the trainer read its parameters in place.

Once an exported sync has told where the engine ranks are, `PullAndSend` decides for each replica:
one of which all ranks can read in place (near) is served as by `Pull`, the others (far) as by
`Send`; each bucket comes both ways. The near are not in the group in which the trainer ranks send:
nobody waits for the engines of the other kind before all have read everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

from sglang_loader.common.ranks import Reason
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
    """Route "send" for far replicas, and `pull`, used by no other route, for near ones if any."""

    def __init__(self, context: RouteContext, pull: Pull, process_group: Callable[[], Any]) -> None:
        far, self._all_readers, self._pull = copy(context), context.readers, pull
        far.readers = lambda: [each for each in context.readers() if not each.reads_in_place]
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
        super().learn(_of_engine_ranks(sync, [not each for each in near]))
        if self.is_prepared and any(near) and not self._pull.prepare(_of_engine_ranks(sync, near)):
            return self.learn(sync)  # again, without `Pull`: it was refused
        return False

    def _near(self, sync: ExportedSync) -> list[bool]:
        """Decide and return which engine ranks are to read in place; collective. No rank is if all
        could: then route "pull" has been tried before.
        """
        self._pull.forget()
        reasons = self._pull.why_not_in_place(sync.loaded)
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
        self.forget()  # to be prepared without `Pull`
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
        return super().recover(cause, weights)  # engines get other groups, unknown to the plan

    def forget(self) -> None:
        super().forget()
        self._pull.forget()


def _of_engine_ranks(sync: ExportedSync, taken: Sequence[bool]) -> ExportedSync:
    """As if these engine ranks alone had taken part."""
    return replace(sync, loaded=list(compress(sync.loaded, taken)))


@dataclass(eq=False)
class PulledAndSent(SyncSource, Delivery):
    """The buckets of one sync, which some engine ranks read in place while others are sent them."""

    _pulled: SyncSource
    _sent: SyncSource

    def __post_init__(self) -> None:
        self.required_arrangements = self._sent.required_arrangements

    def start(self) -> None:
        self._pulled.start()

    def delivery(self, engines: Sequence[EngineRank], poll: Poll) -> Delivery:
        near = [each for each in engines if each.arrangements.reads_in_place]
        far = [each for each in engines if not each.arrangements.reads_in_place]
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
