"""Fills arranged buffers from the ranks' shards: pack, all-to-all, unpack.

    exchange = Exchange(plans, device)
    exchange.reserve()
    for index, buffer in enumerate(buffers):
        exchange.fill(index, shards, buffer)    # all ranks, in the same order

What a rank owns itself goes straight into its buffer while the rest travels. On a GPU everything is
queued on the current stream; the scratch is used again in stream order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from sglang_loader.load_plan.arrangement import Arrangement, Read
from verl_sglang_sync.arranged_packing import ArrangedPacking
from verl_sglang_sync.shard_exchange.exchange_plan import (
    ALIGNMENT_BYTES,
    BucketExchange,
    scratch_nbytes,
)

_WORD = torch.int64


class Exchange:
    """Executes this rank's plans, on torch's default group.

    Args:
        plans: by bucket.
        device: of the shards and the buffers.
    """

    def __init__(self, plans: Sequence[BucketExchange], device: torch.device) -> None:
        self._plans = tuple(plans)
        self._device = device
        self._own = [_copies(plan.own, plan.nbytes, device) for plan in plans]
        self._sends = [_copies(plan.sends, sum(plan.send_nbytes), device) for plan in plans]
        self._landings = [_copies(plan.landings, plan.nbytes, device) for plan in plans]
        self._send = self._recv = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of scratch held at present."""
        return self._send.numel() + self._recv.numel()

    def reserve(self) -> None:
        """Allocate the scratch, so that no rank fails within a collective for want of it."""
        send, recv = scratch_nbytes(self._plans)
        if self._send.numel() < send:
            self._send = torch.empty(send, dtype=torch.uint8, device=self._device)
        if self._recv.numel() < recv:
            self._recv = torch.empty(recv, dtype=torch.uint8, device=self._device)

    def fill(self, index: int, shards: Sequence[torch.Tensor], buffer: torch.Tensor | None) -> None:
        """Fill one bucket's buffer; collective.

        Args:
            index: of the bucket.
            shards: this rank's, flat bytes by parameter.
            buffer: flat uint8 of the arranged size; None: send what the others need, keep nothing.
        """
        plan = self._plans[index]
        send, recv = self._send[: sum(plan.send_nbytes)], self._recv[: sum(plan.recv_nbytes)]
        self._sends[index].pack(shards, send)
        work = dist.all_to_all_single(
            recv.view(_WORD),
            send.view(_WORD),
            [nbytes // ALIGNMENT_BYTES for nbytes in plan.recv_nbytes],
            [nbytes // ALIGNMENT_BYTES for nbytes in plan.send_nbytes],
            async_op=True,
        )
        if buffer is not None:
            self._own[index].pack(shards, buffer)
        work.wait()
        if buffer is not None:
            self._landings[index].pack([recv], buffer)

    def free(self) -> None:
        """Give the scratch back; what is queued must be done."""
        self._send = self._recv = torch.empty(0, dtype=torch.uint8, device=self._device)


def _copies(reads: Sequence[Read], nbytes: int, device: torch.device) -> ArrangedPacking:
    return ArrangedPacking(Arrangement(tuple(reads), nbytes), device)
