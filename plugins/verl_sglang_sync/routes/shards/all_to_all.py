"""The all-to-alls that send the parts of a trainer rank's shards, piece by piece.

A plan makes one `AllToAll`, which runs in every sync:

    moves = AllToAll(pieces, device)           # by bucket, see `exchange_plan.pieces_of`
    moves.begin(shards)                        # at the beginning of a sync
    for number in moves.numbers_of(index):     # for each bucket
        moves.pack(number)                     # into one of two scratch buffers
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
"""The number of pieces, or of broadcast buckets, in transfer at a time, each in its own memory."""


class AllToAll:
    """The all-to-alls of one rank, equal in all syncs.

    The rank must launch every piece, even after a failure. Otherwise the other ranks hang.
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
        """The present size of the scratch."""
        return sum(scratch.numel() for scratch in self._scratch)

    def begin(self, shards: Sequence[torch.Tensor]) -> None:
        """Set this rank's shards, and allocate the scratch.

        No collective can then fail for a lack of scratch.
        """
        while len(self._scratch) < NUM_TRAVELLING:
            self._scratch.append(torch.empty(self._largest, dtype=torch.uint8, device=self._device))
        with torch.no_grad():
            self._memories = [shard.contiguous().view(-1).view(torch.uint8) for shard in shards]

    def end(self) -> None:
        """Free the scratch and drop the shards. All launched work must be done."""
        self._memories.clear()
        self._scratch.clear()

    def numbers_of(self, index: int) -> list[int]:
        """Return the numbers of a bucket's pieces."""
        return self._numbers[index]

    def pack(self, number: int) -> tuple[torch.Tensor, Sequence[int]]:
        """Pack a piece into scratch.

        The piece `NUM_TRAVELLING` before used the same scratch. Its all-to-all must be done.

        Returns:
            The packed bytes, and the number of bytes for each destination.
        """
        sent = self._scratch_of(number)
        with torch.no_grad():
            for launch in self._sends[number].between(self._memories, [sent], sent.device):
                launch()
        return sent, self._sizes[number]

    def launch(
        self, number: int, received: torch.Tensor, recv_nbytes: Sequence[int], group: Any = None
    ) -> Any:
        """Start the all-to-all of a packed piece, and return torch's work.

        Args:
            received: flat uint8 buffer for the bytes of all sources, one source after the other.
            recv_nbytes: bytes of each source. The sum is the size of `received`.
            group: a group of all ranks, or None for torch's default group.
        """
        sent, sizes = self._scratch_of(number), self._sizes[number]
        return all_to_all(sent, sizes, received, recv_nbytes, group)

    def _scratch_of(self, number: int) -> torch.Tensor:
        return self._scratch[number % NUM_TRAVELLING][: sum(self._sizes[number])]
