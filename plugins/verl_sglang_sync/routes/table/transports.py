"""The ways in which rounds get from the trainer ranks to the engine ranks.

`Exchange` (colocated): the trainer ranks send to each other in torch's default group. Each rank
receives what its own engine rank reads, in staging buffers that the engine maps. Each round is a
collective of the default group. A rank that has failed therefore still takes part in the rest.

`Send` (engines on other devices): trainer ranks and engine ranks are one process group
(`engine.update_groups`). Before each round the trainer ranks agree that every engine rank receives,
and that the round that last used the same scratch is done. No rank therefore waits in a collective
for a rank that has failed. The next agreement detects a rank that hangs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_loader.common.broadcast.broadcast import Transfer
from verl_sglang_sync.engine.engine_ranks import EngineRank, wait_for
from verl_sglang_sync.engine.session import TrainerSession
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.broadcast import NUM_TRAVELLING, GroupDelivery
from verl_sglang_sync.routes.route import Poll
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.routes.table.sending import Sender
from verl_sglang_sync.trainer_ranks import world_size

logger = logging.getLogger(__name__)


class RoundsInSync:
    """The rounds of one sync on one trainer rank."""

    def run(self) -> None:
        """Send all rounds."""
        raise NotImplementedError

    def drain(self) -> None:
        """Take part in the rounds that are left, if the other ranks need that."""

    def count(self, report: SyncReport, num_buckets: int) -> None:
        """Add the good sync to the report."""
        raise NotImplementedError


class Transport:
    """A way to send rounds, for all syncs."""

    def destinations(self, readers: Sequence[int]) -> tuple[list[int], int]:
        """Return the places of the engine ranks that are sent to.

        Args:
            readers: the position of each of them among all engine ranks.

        Returns:
            The rank of each in the group, and the number of ranks in the group.
        """
        raise NotImplementedError

    def rounds(
        self, sender: Sender, engines: Sequence[EngineRank], report: SyncReport
    ) -> RoundsInSync:
        """Prepare the rounds of one sync. Allocate the memory for them.

        Args:
            sender: has begun the sync.
            engines: the engine ranks of this trainer rank that are sent to.
        """
        raise NotImplementedError

    def free(self) -> None:
        """Free the memory of the rounds of one sync."""


class Exchange(Transport):
    """The transport of a colocated trainer. See the module."""

    def __init__(self, ring: StagingRing, limit_s: float) -> None:
        self._ring = ring
        self._limit_s = limit_s

    def destinations(self, readers: Sequence[int]) -> tuple[list[int], int]:
        return list(readers), world_size()  # an engine rank has the number of its trainer rank

    def rounds(
        self, sender: Sender, engines: Sequence[EngineRank], report: SyncReport
    ) -> RoundsInSync:
        return _ExchangedRounds(sender, engines, report, self._ring, self._limit_s)

    def free(self) -> None:
        self._ring.free()


class _ExchangedRounds(RoundsInSync):
    def __init__(
        self,
        sender: Sender,
        engines: Sequence[EngineRank],
        report: SyncReport,
        ring: StagingRing,
        limit_s: float,
    ) -> None:
        self._sender, self._ring, self._report, self._limit_s = sender, ring, report, limit_s
        self._engines = engines
        own = engines[0].known.rounds if engines else ()
        nothing = [0] * sender.plan.num_ranks
        self._sizes = [each.sizes for each in own]
        self._num_own = len(own)
        # The other ranks may have more rounds, in which this rank receives nothing.
        self._sizes += [nothing] * (sender.plan.num_rounds - self._num_own)
        self._next = 0
        ring.prepare(list(map(sum, self._sizes[: self._num_own])))
        held = ring.nbytes + sender.nbytes
        report.staging_bytes = max(report.staging_bytes, held)

    def run(self) -> None:
        travelling: deque[tuple[int, Any]] = deque()
        while self._next < len(self._sizes):
            number = self._next
            travelling.append((number, self._launch(makes_room=True)))
            # The gloo backend of torch 2.11 has crashed with two collectives in a group at a time.
            if len(travelling) == (NUM_TRAVELLING if self._is_on_gpu else 1):
                self._deliver(*travelling.popleft())
        for number, work in travelling:
            self._deliver(number, work)

    @property
    def _is_on_gpu(self) -> bool:
        return self._ring.buffer(0).is_cuda

    def _launch(self, *, makes_room: bool) -> Any:
        """Start the next round. This rank takes part even if it raises an error."""
        number, self._next = self._next, self._next + 1
        error: BaseException | None = None
        try:
            if makes_room:
                self._make_room(number)
            with self._report.stage("pack"):
                self._sender.pack(number)
        except BaseException as failed:  # the other ranks are in the round
            error = failed
        size = sum(self._sizes[number])
        buffer = self._ring.buffer(number)[:size]
        work = self._sender.launch(number, buffer, self._sizes[number])
        if error is not None:
            work.wait()
            raise error
        return work

    def _make_room(self, number: int) -> None:
        """Wait until the engine rank has read the round that last used the same buffer."""
        num_read = number - self._ring.num_buffers + 1

        def has_read(session: TrainerSession) -> bool:
            return session.num_done > num_read  # the first load was of mapped shards

        if num_read > 0 and number < self._num_own:
            with self._report.stage("load"):
                wait_for(self._engines, has_read, self._limit_s)

    def _deliver(self, number: int, work: Any) -> None:
        """Wait for a round, and request the engine rank to load it."""
        with self._report.stage("gather"):
            work.wait()
            storage = self._ring.written(number)
        if number < self._num_own:
            for engine in self._engines:
                with engine.naming_errors():
                    slot = engine.session.map_buffer(storage, keep=False)
                    engine.session.load_round(slot=slot)

    def drain(self) -> None:
        # The other ranks wait for the bytes of this rank.
        while self._next < len(self._sizes):
            try:
                self._launch(makes_room=False).wait()  # nothing is loaded any more
            except Exception:
                text = "this rank could not send its part of a round, so other ranks may hang"
                logger.warning(text, exc_info=True)

    def count(self, report: SyncReport, num_buckets: int) -> None:
        report.num_exchanged += num_buckets
        count_pairs(report, self._engines)


class Send(Transport):
    """The transport to engines on other devices. See the module.

    Args:
        process_group: returns the group of all trainer ranks and engine ranks in a sync.
        poll: waits together with all trainer ranks.
    """

    def __init__(
        self, process_group: Callable[[], Any], poll: Poll, limit_s: float, device: torch.device
    ) -> None:
        self._process_group = process_group
        self._poll = poll
        self._limit_s = limit_s
        self._device = device

    def destinations(self, readers: Sequence[int]) -> tuple[list[int], int]:
        first, num = world_size(), len(readers)
        return list(range(first, first + num)), first + num

    def rounds(
        self, sender: Sender, engines: Sequence[EngineRank], report: SyncReport
    ) -> RoundsInSync:
        group = self._process_group()
        return _SentRounds(sender, engines, report, group, self._poll, self._limit_s, self._device)


class _SentRounds(GroupDelivery, RoundsInSync):
    def __init__(
        self,
        sender: Sender,
        engines: Sequence[EngineRank],
        report: SyncReport,
        group: Any,
        poll: Poll,
        limit_s: float,
        device: torch.device,
    ) -> None:
        super().__init__(engines, limit_s, poll, report)
        self._sender, self._group = sender, group
        self._nothing = torch.empty(0, dtype=torch.uint8, device=device)

    def run(self) -> None:
        for number in range(self._sender.plan.num_rounds):
            for engine in self._engines:
                with engine.naming_errors():
                    engine.session.load_round(receives=self._receives(engine, number))
            with self._report.stage("load"):
                self._wait(number + 2)  # one for the mapped shards, and one for each round so far
            with self._report.stage("pack"):
                self._start(number)

    def _receives(self, engine: EngineRank, number: int) -> list[int]:
        """Return the bytes that an engine rank receives from each rank of the group."""
        sizes, num_ranks = [0] * self._sender.plan.num_ranks, world_size()
        if number < len(engine.known.rounds):
            sizes[:num_ranks] = engine.known.rounds[number].sizes
        return sizes

    def _start(self, number: int) -> None:
        try:
            self._sender.pack(number)
        finally:  # even after a failure, because the other ranks would hang
            # A trainer rank only sends.
            none = [0] * self._sender.plan.num_ranks
            work = self._sender.launch(number, self._nothing, none, self._group)
            self._travelling.append((number, Transfer(work, self._nothing.device)))

    def count(self, report: SyncReport, num_buckets: int) -> None:
        report.num_sent += num_buckets
        count_pairs(report, self._engines)


def count_pairs(report: SyncReport, engines: Sequence[EngineRank]) -> None:
    """Record the bytes that each trainer rank has sent to each of these engine ranks."""
    by_reader = []
    for engine in engines:
        payloads = [[0] * world_size(), *(each.payloads for each in engine.known.rounds)]
        # Without the gaps: these are bytes of weights.
        by_reader.append([sum(of_rank) for of_rank in zip(*payloads, strict=True)])
    report.pair_bytes = [list(of_rank) for of_rank in zip(*by_reader, strict=True)]
    report.sent_bytes = sum(map(sum, report.pair_bytes))
