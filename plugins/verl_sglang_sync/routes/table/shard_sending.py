"""The sending of shards in rounds, for all syncs of one trainer rank.

    sending = ShardSending(context, transport)
    rounds = sending.prepare(traced, weights, engines, positions, report)    # in each sync
    rounds.run()
    sending.free()
    sending.forget()               # the engine ranks or the trace have changed

An engine rank lists the rounds that it needs when it is requested to load shards. The lists stay
the same from sync to sync. A list names the bytes from all trainer ranks, so each trainer rank gets
its own part of all lists. What it packs for each round is then planned once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from sglang_loader.common.rounds import (
    RoundPart,
    decode_parts,
    decode_rounds,
    encode_parts,
    parts_of,
)
from sglang_loader.common.session.messages import SessionError
from verl_sglang_sync.engine.engine_ranks import EngineRank, waiting
from verl_sglang_sync.engine.session import TrainerSession
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.routes.route import RouteContext
from verl_sglang_sync.routes.table.sending import Sender, SendPlan, all_to_all_bytes, check_parts
from verl_sglang_sync.routes.table.transports import RoundsInSync, Transport
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sources.export_trace import TracedExport
from verl_sglang_sync.sources.snapshot import locals_of
from verl_sglang_sync.trainer_ranks import own_rank, world_size


class ShardSending:
    """The sending of shards. See the module.

    Args:
        transport: makes the exchange of rounds, given the plan of a sender.

    Attributes:
        sender: the sender for the rounds that the engine ranks have listed, or None.
    """

    def __init__(self, context: RouteContext, transport: Transport) -> None:
        self.sender: Sender | None = None
        self._ranks = context.ranks
        self._device = context.device
        self._source_map = context.source_map
        self._limit_s = context.settings.request_timeout_s
        self._transport = transport
        # The engine ranks that are sent to, by position, with the digests of their rounds.
        self._listed_rounds: list[tuple[int, str]] = []

    def prepare(
        self,
        traced: TracedExport,
        weights: Iterable[NamedTensor],
        engines: Sequence[EngineRank],
        positions: Sequence[int],
        report: SyncReport,
    ) -> RoundsInSync:
        """Prepare the rounds of one sync. Collective.

        Args:
            engines: all engine ranks of this trainer rank, which were requested to load shards.
            positions: the position of each of them among all engine ranks.
        """
        pairs = zip(positions, engines, strict=True)
        sent_to = {at: engine for at, engine in pairs if engine.known.is_sent_to}
        receivers = list(sent_to.values())
        # All ranks go on to the collectives of the rounds, or none does.
        with self._ranks.section(), report.stage("plan"):
            self._receive_lists(receivers)
            sender = self._sender_for(traced, sent_to)
            sender.begin(locals_of(self._shards(traced, weights)))
            rounds = self._transport.rounds(sender, receivers, report)
            self._ranks.check()
        return rounds

    def free(self) -> None:
        """Free the memory that only a sync needs."""
        self._transport.free()
        if self.sender is not None:
            self.sender.end()

    def forget(self) -> None:
        """Drop the sender."""
        self.sender, self._listed_rounds = None, []

    def _receive_lists(self, engines: Sequence[EngineRank]) -> None:
        """Wait until all engine ranks that are sent to have listed their rounds. Collective.

        Args:
            engines: those of this trainer rank.
        """
        self._ranks.poll(waiting(engines, _has_listed, self._limit_s, "no list of rounds came"))
        for engine in engines:
            listed, known = engine.session.rounds, engine.known
            assert listed is not None, "waited for"
            with engine.naming_errors():
                # The data comes only if the trainer has other rounds, or none.
                if listed.data is not None:
                    known.rounds = decode_rounds(listed.data, world_size())
                    known.rounds_digest = listed.digest
                elif listed.digest != known.rounds_digest:
                    raise SessionError(f"rounds {listed.digest} were never sent to the trainer")

    def _sender_for(self, traced: TracedExport, sent_to: dict[int, EngineRank]) -> Sender:
        """Return the sender of the listed rounds. Collective.

        Args:
            sent_to: this trainer rank's engine ranks that are sent to, by position.
        """
        # The digests are small. The lists themselves travel only after a change.
        digests = {at: engine.known.rounds_digest for at, engine in sent_to.items()}
        listed = list(chain(*(of_rank.items() for of_rank in self._ranks.gather(digests))))
        if self.sender is not None and self._ranks.all(listed == self._listed_rounds):
            return self.sender
        # Each trainer rank needs only its own parts of the rounds.
        parts = [
            encode_parts(
                {at: parts_of(engine.known.rounds, rank) for at, engine in sent_to.items()}
            )
            for rank in range(world_size())
        ]
        by_reader: dict[int, list[RoundPart]] = {}
        for data in all_to_all_bytes(parts, self._ranks, self._device):
            by_reader.update(decode_parts(data))
        # The lists come from other processes, and name bytes of this rank's memory.
        check_parts(traced, chain(*by_reader.values()), own_rank())
        positions = [position for position, _ in listed]
        places, num_ranks = self._transport.destinations(positions)
        readers = [by_reader[position] for position in positions]
        send_plan = SendPlan.of(traced, readers, places, num_ranks)
        self.sender, self._listed_rounds = Sender(send_plan, self._device), listed
        return self.sender

    def _shards(self, traced: TracedExport, weights: Iterable[NamedTensor]) -> list[torch.Tensor]:
        """Return this rank's shards, by parameter. The shard is empty if the rank holds none."""
        sources, own = self._source_map.parameters(weights, traced), own_rank()
        nothing = torch.empty(0, device=self._device)
        return [
            sources[parameter.source] if parameter.owners.is_held_by(own) else nothing
            for parameter in traced.parameters
        ]


def _has_listed(session: TrainerSession) -> bool:
    """Return True if the engine rank has listed its rounds."""
    return session.rounds is not None
