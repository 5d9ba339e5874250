"""A broadcast or an all-to-all in an update group, waited for with a time limit.

NCCL's `wait()` only makes a stream wait, and after a failure of the communicator `is_completed()`
is true although the bytes never came. So on a GPU an event is recorded behind the collective, on a
stream of its own: the bytes are there when the event has happened, and a collective that never ends
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
"""If torch reports completion this long before the event, NCCL has failed."""


WORD = torch.int64
"""The unit of an all-to-all: all of its sizes are whole words."""


class BroadcastError(RuntimeError):
    """A collective has failed or timed out; the group must be formed anew."""


class Transfer:
    """A collective in progress, which every rank starts. Its buffers must stay untouched until it
    is done. `work`: torch's; None: there is nothing to wait for.
    """

    def __init__(self, work: Any, device: torch.device) -> None:
        self._started = time.monotonic()
        self._work = work
        self._event: torch.cuda.Event | None = None
        self._completed_at: float | None = None
        if work is not None and device.type == "cuda":
            with torch.cuda.stream(_watching_stream(device)):
                work.wait()
                self._event = torch.cuda.Event()
                self._event.record()

    def is_done(self) -> bool:
        """True once the device has sent and received all bytes; never blocks on a GPU.

        Raises:
            BroadcastError: a peer is gone, or the communicator has failed.
        """
        if self._work is None:
            return True
        try:
            return self._is_done_here() if self._event is None else self._is_done_on_gpu()
        except RuntimeError as error:
            raise BroadcastError(str(error)) from None

    def has_arrived(self, timeout_s: float, what: str) -> bool:
        """Like `is_done`, with a limit of `timeout_s` seconds since the collective was started.

        Raises:
            BroadcastError: it takes longer, or has failed; `what` names it in the error.
        """
        try:
            if self.is_done():
                return True
            if time.monotonic() - self._started > timeout_s:
                raise BroadcastError(f"nothing within {timeout_s:g} s")
        except BroadcastError as error:
            raise BroadcastError(f"{what} did not arrive: {error}") from None
        return False

    def wait(self, timeout_s: float, what: str) -> None:
        """Wait until it is done; arguments and errors as for `has_arrived`."""
        while not self.has_arrived(timeout_s, what):
            time.sleep(POLL_S)

    def _is_done_here(self) -> bool:
        if not self._work.is_completed():
            return False
        self._work.wait()  # raises what went wrong
        return True

    def _is_done_on_gpu(self) -> bool:
        assert self._event is not None
        if self._event.query():
            return True
        if self._work.is_completed():
            now = time.monotonic()
            self._completed_at = self._completed_at or now
            if now - self._completed_at > GRACE_S:
                raise BroadcastError("NCCL gave the transfer up")
        return False


class Broadcast(Transfer):
    """A broadcast of contiguous uint8: rank 0 sends it, the others receive it."""

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
    """Start an all-to-all between all ranks of a group; returns torch's work.

    Args:
        sent: flat uint8: the bytes for each rank, one after the other; `received` likewise.
        send_nbytes: bytes for each rank, whole words; they add up to `sent`.
        group: the process group; None: torch's default group.
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
