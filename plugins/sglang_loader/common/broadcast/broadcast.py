"""A broadcast or an all-to-all in an update group, with a limited wait.

NCCL's `wait()` only makes a stream wait. After a failure of the communicator `is_completed()` is
true although the bytes never came. So on a GPU an event is recorded behind the collective, on a
stream of its own. When the event has happened, the bytes are there. A collective that never ends
blocks no other stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

POLL_S = 0.0002
GRACE_S = 1.0
"""The longest time between torch's report of completion and the event. Later, NCCL has failed."""


WORD = torch.int64
"""The unit of an all-to-all. All sizes are whole words."""


class BroadcastError(RuntimeError):
    """A collective that has failed or timed out. The group must be formed anew."""


class Transfer:
    """A collective in progress, which every rank starts.

    The buffers must stay untouched until the end.

    Args:
        work: torch's handle of the collective, or None if there is nothing to wait for.
        device: of the buffers.
    """

    def __init__(self, work: Any, device: torch.device) -> None:
        self._started = time.monotonic()
        self._work = work
        self._event: torch.cuda.Event | None = None
        self._completed_at: float | None = None
        # `work.wait` blocks the current stream, not this thread. In a stream of its own no other
        # work waits behind it.
        if work is not None and device.type == "cuda":
            with torch.cuda.stream(_watching_stream(device)):
                work.wait()
                self._event = torch.cuda.Event()
                self._event.record()

    def is_done(self) -> bool:
        """Return True once the device has sent and received all bytes. Never blocks on a GPU.

        Raises:
            BroadcastError: a peer is gone, or the communicator has failed.
        """
        if self._work is None:
            return True
        try:
            return self._is_done_on_cpu() if self._event is None else self._is_done_on_gpu()
        except RuntimeError as error:
            raise BroadcastError(str(error)) from None

    def has_arrived(self, timeout_s: float, name: str) -> bool:
        """Return True once all bytes have come, like `is_done`, with a time limit.

        Args:
            timeout_s: the limit, in seconds since the collective was started.
            name: of the transfer, for the error.

        Raises:
            BroadcastError: the collective takes longer, or has failed.
        """
        try:
            if self.is_done():
                return True
            if time.monotonic() - self._started > timeout_s:
                raise BroadcastError(f"nothing within {timeout_s:g} s")
        except BroadcastError as error:
            raise BroadcastError(f"{name} did not arrive: {error}") from None
        return False

    def wait(self, timeout_s: float, name: str) -> None:
        """Wait for the end of the collective. Arguments and errors are those of `has_arrived`."""
        while not self.has_arrived(timeout_s, name):
            time.sleep(POLL_S)

    def _is_done_on_cpu(self) -> bool:
        if not self._work.is_completed():
            return False
        self._work.wait()  # raises the error of a failed transfer
        return True

    def _is_done_on_gpu(self) -> bool:
        assert self._event is not None
        if self._event.query():
            return True
        # NCCL also completes a transfer that it gave up. Then the event never comes.
        if self._work.is_completed():
            time_s = time.monotonic()
            self._completed_at = self._completed_at or time_s
            if time_s - self._completed_at > GRACE_S:
                raise BroadcastError("NCCL gave the transfer up")
        return False


class Broadcast(Transfer):
    """A broadcast of contiguous uint8. Rank 0 sends the bytes, the other ranks receive them."""

    def __init__(self, flat: torch.Tensor, group: Any) -> None:
        work = None
        if flat.numel():
            work = dist.broadcast(flat, src=0, group=group, async_op=True)
        super().__init__(work, flat.device)


def all_to_all(
    sent: torch.Tensor,
    send_nbytes: Sequence[int],
    received: torch.Tensor,
    recv_nbytes: Sequence[int],
    group: Any,
) -> Any:
    """Start an all-to-all between all ranks of a group, and return torch's work.

    Args:
        sent: flat uint8 with the bytes for each rank, one after the other.
        send_nbytes: bytes for each rank, whole words. They add up to `sent`.
        received: flat uint8 for the bytes from each rank, one after the other.
        recv_nbytes: bytes from each rank, whole words. They add up to `received`.
        group: the process group, or None for torch's default group.
    """
    return dist.all_to_all_single(
        received.view(WORD),
        sent.view(WORD),
        [nbytes // WORD.itemsize for nbytes in recv_nbytes],
        [nbytes // WORD.itemsize for nbytes in send_nbytes],
        group=group,
        async_op=True,
    )


@cache
def _watching_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # not from the pool of default priority
