"""The engine ranks of a trainer rank, as it keeps them from sync to sync."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_loader.common.rounds import SentRound


class KnownEngineRank:
    """The part of an engine rank that is kept from sync to sync.

    Args:
        replica: number of its replica among those that this trainer rank has sessions with.

    Attributes:
        is_sent_to: trainer ranks send shards that it cannot map, to the engine rank or to another
            rank of its process group.
        proven_plan: name of the load plan with which the route to this engine rank was proven.
        rounds_digest: digest of `rounds`, or "".
        rounds: the bytes that trainer ranks send, as the engine rank has last listed them.
    """

    def __init__(self, replica: int = 0) -> None:
        self.replica = replica
        self.is_sent_to = False
        self.proven_plan = ""
        self.rounds_digest = ""
        self.rounds: Sequence[SentRound] = ()
