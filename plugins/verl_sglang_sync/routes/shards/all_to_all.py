"""Packs what a trainer rank sends of its shards, and sends it, piece by piece.

moves = AllToAll(pieces, device)           # by bucket, see `exchange_plan.pieces_of`
moves.begin(shards)                        # of a sync
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
from sglang_loader.common.fused_copies import FusedCopies
from verl_sglang_sync.routes.shards.exchange_plan import PieceSends

NUM_TRAVELLING = 2
"""Pieces, or broadcast buckets, on their way at a time; each needs memory of its own."""


class AllToAll:
    """What this rank sends, sync after sync; it has to launch every piece, whatever happens: the
    other ranks would wait for ever.
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
        """Bytes of scratch held at present."""
        return sum(scratch.numel() for scratch in self._scratch)

    def begin(self, shards: Sequence[torch.Tensor]) -> None:
        """Take this rank's shards; scratch is allocated now, lest a collective fail."""
        while len(self._scratch) < NUM_TRAVELLING:
            self._scratch.append(torch.empty(self._largest, dtype=torch.uint8, device=self._device))
        with torch.no_grad():
            self._memories = [each.contiguous().view(-1).view(torch.uint8) for each in shards]

    def end(self) -> None:
        """Give the scratch back and let go of the shards; what is queued must be done."""
        self._memories.clear()
        self._scratch.clear()

    def numbers_of(self, index: int) -> list[int]:
        """Numbers of the pieces in which a bucket is sent."""
        return self._numbers[index]

    def pack(self, number: int) -> tuple[torch.Tensor, Sequence[int]]:
        """Pack a piece into the scratch of the one `NUM_TRAVELLING` before; returns it, and its
        bytes by destination.
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
            received: flat uint8; gets what comes, by source.
            recv_nbytes: by source; they add up to `received`.
            group: None: torch's default group.
        """
        sent, sizes = self._scratch_of(number), self._sizes[number]
        return all_to_all(sent, sizes, received, recv_nbytes, group)

    def _scratch_of(self, number: int) -> torch.Tensor:
        return self._scratch[number % NUM_TRAVELLING][: sum(self._sizes[number])]
