"""Fills arranged buffers from the ranks' shards: pack, all-to-all, unpack, piece after piece.

While a piece travels, the next is packed, what a rank owns itself goes straight into its buffer,
and the piece before is unpacked. On a GPU all of it is queued; the scratch is used again in stream
order.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from sglang_loader.common.broadcast.broadcast import all_to_all
from sglang_loader.common.regions.arrangement import Arrangement, Read
from verl_sglang_sync.routes.exchange.byte_gather import ByteGather
from verl_sglang_sync.routes.exchange.exchange_plan import PieceExchange

logger = logging.getLogger(__name__)

NUM_TRAVELLING = 2
"""Pieces on their way at a time; each needs scratch of its own.

Over gloo `fill` leaves none on its way: with two collectives in a group at a time, such as one of
these and the export's, torch 2.11 has crashed (SIGSEGV in gloo's `~UnboundBuffer`).
"""


class AllToAll:
    """Executes this rank's plans, by bucket, then by piece.

    `fill` does all of it in torch's default group ("exchange"); `pack` and `launch` send a piece in
    any group ("send").
    """

    def __init__(self, plans: Sequence[Sequence[PieceExchange]], device: torch.device) -> None:
        self._device = device
        self._num_ahead = NUM_TRAVELLING if device.type == "cuda" else 1
        self._pieces = [
            _Piece(
                plan,
                bucket,
                own=_copies(plan.own, plan.nbytes, device),
                sends=_copies(plan.sends, sum(plan.send_nbytes), device),
                unpacks=_copies(plan.unpacks, plan.nbytes, device),
            )
            for bucket, some in enumerate(plans)
            for plan in some
        ]
        numbers = iter(range(len(self._pieces)))
        self._numbers = [list(islice(numbers, len(of_bucket))) for of_bucket in plans]
        self._nbytes = [of_bucket[0].nbytes for of_bucket in plans]
        sends = [sum(piece.plan.send_nbytes) for piece in self._pieces]
        receives = [sum(piece.plan.recv_nbytes) for piece in self._pieces]
        self._largest = max(sends, default=0), max(receives, default=0)
        self._scratch = [(self._empty(0), self._empty(0))] * NUM_TRAVELLING
        self._shards: Sequence[torch.Tensor] = ()
        self._num_started = self._num_finished = 0
        self._travelling: deque[dist.Work | None] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of scratch held at present."""
        return sum(half.numel() for scratch in self._scratch for half in scratch)

    def begin(self, shards: Sequence[torch.Tensor]) -> None:
        """Take this rank's contiguous shards; scratch is allocated now, lest a collective fail."""
        for number, (send, recv) in enumerate(self._scratch):
            if (send.numel(), recv.numel()) != self._largest:
                self._scratch[number] = self._empty(self._largest[0]), self._empty(self._largest[1])
        self._shards = shards
        self._num_started = self._num_finished = 0
        self._travelling.clear()

    def fill(self, index: int, buffer: torch.Tensor | None) -> None:
        """Fill one bucket's buffer; collective.

        Args:
            buffer: flat uint8 of the arranged size; None: send what the others need, keep nothing.

        Raises:
            Exception: the first that went wrong; the other ranks got their turn all the same.
        """
        needed = self._nbytes[index]
        if buffer is not None and buffer.numel() != needed:
            raise ValueError(
                f"bucket {index} has a buffer of {buffer.numel()} bytes, was prepared for {needed}"
            )
        failed: Exception | None = None
        while not self._is_done and self._pieces[self._num_finished].bucket <= index:
            is_wanted = failed is None and self._pieces[self._num_finished].bucket == index
            try:
                self._advance(buffer if is_wanted else None)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def drain(self) -> None:
        """Send all that the other ranks still wait for, whatever happens."""
        if self._is_done:
            return
        try:
            self.fill(self._pieces[-1].bucket, None)
        except Exception:
            logger.warning("what other ranks wait for could not be sent", exc_info=True)

    def end(self) -> None:
        """Give the scratch back and let go of the shards; what is queued must be done."""
        self._shards = ()
        self._scratch = [(self._empty(0), self._empty(0))] * NUM_TRAVELLING

    def _scratch_of(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes that a piece sends and those that it receives."""
        plan, (send, recv) = self._pieces[number].plan, self._scratch[number % NUM_TRAVELLING]
        return send[: sum(plan.send_nbytes)], recv[: sum(plan.recv_nbytes)]

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    @property
    def _is_done(self) -> bool:
        return self._num_finished == len(self._pieces)

    def _advance(self, buffer: torch.Tensor | None) -> None:
        """Have the next pieces on their way, and finish the oldest; it is counted in any case."""
        number, self._num_finished = self._num_finished, self._num_finished + 1
        failed: Exception | None = None
        while self._num_started < min(number + self._num_ahead, len(self._pieces)):
            try:
                self._start()
            except Exception as error:
                failed = failed or error
        try:
            self._finish(number, buffer if failed is None else None)
        finally:
            if failed is not None:
                raise failed

    def numbers_of(self, index: int) -> list[int]:
        return self._numbers[index]

    def pack(self, number: int) -> tuple[torch.Tensor, Sequence[int]]:
        """Pack a piece into the scratch of the one `NUM_TRAVELLING` before; returns it, and its
        sizes.
        """
        piece, (sent, _) = self._pieces[number], self._scratch_of(number)
        piece.sends.run(self._shards, sent)
        return sent, piece.plan.send_nbytes

    def launch(self, number: int, group: Any = None) -> Any:
        """Have a packed piece on its way in a group of all ranks; None: torch's default group."""
        plan, (sent, received) = self._pieces[number].plan, self._scratch_of(number)
        return all_to_all(sent, plan.send_nbytes, received, plan.recv_nbytes, group)

    def _start(self) -> None:
        number, self._num_started = self._num_started, self._num_started + 1
        work = None
        try:
            self.pack(number)
        finally:  # without these bytes the other ranks would hang: that they fail is agreed later
            try:
                work = self.launch(number)
            finally:
                self._travelling.append(work)

    def _finish(self, number: int, buffer: torch.Tensor | None) -> None:
        piece, (_, received) = self._pieces[number], self._scratch_of(number)
        work = self._travelling.popleft()
        try:
            if buffer is not None:
                piece.own.run(self._shards, buffer)
        finally:
            if work is not None:
                work.wait()
        if buffer is not None:
            piece.unpacks.run([received], buffer)


@dataclass(frozen=True)
class _Piece:
    """A piece and the copies that it takes."""

    plan: PieceExchange
    bucket: int
    own: ByteGather
    sends: ByteGather
    unpacks: ByteGather


def _copies(reads: Sequence[Read], nbytes: int, device: torch.device) -> ByteGather:
    return ByteGather(Arrangement(tuple(reads), nbytes), device)
