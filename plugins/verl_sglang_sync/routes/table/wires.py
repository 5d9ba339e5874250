"""The wire of each pair of a trainer rank and an engine rank: mapped memory, or sent rounds. Pure.

An engine rank maps the memory of trainer ranks on its own host. The other trainer ranks send it the
bytes that it reads. All send if nothing can or may be mapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from verl_sglang_sync.sources.owners import Owners, nearest


@dataclass(frozen=True)
class Wires:
    """The wires of all pairs, equal on all trainer ranks.

    Attributes:
        trainer_hosts: the host of each trainer rank.
        reader_hosts: the host of each engine rank.
        first_reader: the number of the first engine rank, see `RouteContext`.
        can_map: False if no engine rank maps anything.
    """

    trainer_hosts: tuple[str, ...]
    reader_hosts: tuple[str, ...]
    first_reader: int
    can_map: bool

    def is_mapped(self, rank: int, reader: int) -> bool:
        """Return True if an engine rank maps the memory of a trainer rank.

        Args:
            reader: the position of the engine rank among all engine ranks.
        """
        return self.can_map and self.trainer_hosts[rank] == self.reader_hosts[reader]

    def holder(self, holders: Sequence[int], reader: int) -> int:
        """Return the trainer rank from which an engine rank gets a shard.

        Args:
            holders: the trainer ranks that hold the shard.
        """
        # A copy that can be read in place costs no rank any work.
        mapped = [rank for rank in holders if self.is_mapped(rank, reader)]
        return nearest(mapped or holders, self.first_reader + reader)

    def readers_of(self, rank: int) -> list[int]:
        """Return the engine ranks that map the memory of a trainer rank."""
        return [i for i in range(len(self.reader_hosts)) if self.is_mapped(rank, i)]

    def is_sent_to(self, reader: int, owners: Iterable[Owners]) -> bool:
        """Return True if an engine rank is sent a shard of one of these parameters."""
        return any(
            not self.is_mapped(self.holder(holders, reader), reader)
            for of_parameter in owners
            for holders in of_parameter.holders
        )
