"""Packs the parts of a trainer rank's shards that it sends, and sends them piece by piece.

moves = AllToAll(pieces, device)           # by bucket, see `exchange_plan.pieces_of`
moves.begin(shards)                        # at the beginning of a sync
for number in moves.numbers_of(bucket):
    moves.pack(number)                     # into the scratch of the piece two before
    work = moves.launch(number, received, sizes, group)
moves.end()
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from sglang_loader.common.broadcast.broadcast import all_to_all
from sglang_loader.common.copies.fused import FusedCopies
from verl_sglang_sync.routes.shards.exchange_plan import PieceSends

NUM_TRAVELLING = 2
"""Number of pieces, or of broadcast buckets, that are sent at a time, each with its own memory."""


class AllToAll:
    """The all-to-alls of one rank, the same in all syncs. It must launch every piece, even after a
    failure: the other ranks would wait for ever.
    """

    def __init__(self, buckets: Sequence[Sequence[PieceSends]], device: torch.device) -> None:
        self._device = device
        pieces = [piece for of_bucket in buckets for piece in of_bucket]
        self._sizes = [piece.nbytes for piece in pieces]
        self._sends = [
            FusedCopies([(read.as_copy(), read.tensor) for read in piece.reads]) for piece in pieces
        ]
        numbers = iter(range(len(pieces)))
        self._numbers = [list(islice(numbers, len(of_bucket))) for of_bucket in buckets]
        self._largest = max(map(sum, self._sizes), default=0)
        self._scratch: list[torch.Tensor] = []
        self._memories: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Size of the scratch at present."""
        return sum(scratch.numel() for scratch in self._scratch)

    def begin(self, shards: Sequence[torch.Tensor]) -> None:
        """Set this rank's shards, and allocate the scratch, so that no collective fails for it."""
        while len(self._scratch) < NUM_TRAVELLING:
            self._scratch.append(torch.empty(self._largest, dtype=torch.uint8, device=self._device))
        with torch.no_grad():
            self._memories = [each.contiguous().view(-1).view(torch.uint8) for each in shards]

    def end(self) -> None:
        """Free the scratch and drop the shards; all launched work must be done."""
        self._memories.clear()
        self._scratch.clear()

    def numbers_of(self, index: int) -> list[int]:
        """Numbers of the pieces in which a bucket is sent."""
        return self._numbers[index]

    def pack(self, number: int) -> tuple[torch.Tensor, Sequence[int]]:
        """Pack a piece into scratch, which it shares with the piece `NUM_TRAVELLING` before.
        Returns the packed bytes, and their number by destination.
        """
        sent = self._scratch_of(number)
        with torch.no_grad():
            for launch in self._sends[number].between(self._memories, [sent], sent.device):
                launch()
        return sent, self._sizes[number]

    def launch(
        self, number: int, received: torch.Tensor, recv_nbytes: Sequence[int], group: Any = None
    ) -> Any:
        """Start the all-to-all of a packed piece, in a group of all ranks; returns torch's work.

        Args:
            received: flat uint8; gets the bytes of all sources, one after the other.
            recv_nbytes: bytes of each source; they add up to `received`.
            group: None: torch's default group.
        """
        sent, sizes = self._scratch_of(number), self._sizes[number]
        return all_to_all(sent, sizes, received, recv_nbytes, group)

    def _scratch_of(self, number: int) -> torch.Tensor:
        return self._scratch[number % NUM_TRAVELLING][: sum(self._sizes[number])]
