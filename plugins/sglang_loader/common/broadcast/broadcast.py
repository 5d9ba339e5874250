"""One broadcast of a flat buffer from rank 0 of an update group, awaited with a time limit.

NCCL's `wait()` only makes a stream wait, and once its communicator has failed `is_completed()` is
true although the bytes never came. So on a GPU an event is watched, recorded behind the broadcast
on a stream that nothing else runs on: the bytes are there when the event is, and a broadcast that
never ends blocks no stream that the process needs.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

POLL_S = 0.0002
GRACE_S = 1.0
"""Longest time between "completed" by torch's account and the event, unless NCCL has failed."""


class BroadcastError(RuntimeError):
    """The bytes of a broadcast did not come; the group must be formed anew."""


class Broadcast:
    """A broadcast in progress; both ends start it.

    With NCCL the first one of a group blocks until all ranks have come, see `update_group.connect`.

    Args:
        flat: contiguous uint8; rank 0 sends it, the others receive it. Not to be touched, nor freed
            for other use, before the broadcast is done.
        group: the process group.
    """

    def __init__(self, flat: torch.Tensor, group: Any) -> None:
        self.flat = flat
        self._started = time.monotonic()
        self._work: Any = None
        self._event: torch.cuda.Event | None = None
        self._completed_at: float | None = None
        if not flat.numel():
            return
        self._work = dist.broadcast(flat, src=0, group=group, async_op=True)
        if flat.is_cuda:
            with torch.cuda.stream(_watching_stream(flat.device)):
                self._work.wait()
                self._event = torch.cuda.Event()
                self._event.record()

    def is_done(self) -> bool:
        """True once the device has sent or received all bytes; never blocks on a GPU.

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
        """`is_done`, for as long as there is time.

        Args:
            timeout_s: longest time since it began, in seconds.
            what: names it in the error.

        Raises:
            BroadcastError: it takes longer, or failed.
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
                raise BroadcastError("NCCL gave the broadcast up")
        return False


@cache
def _watching_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # of another pool than everyone's default
