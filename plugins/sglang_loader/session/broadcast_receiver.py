"""Receives the buckets that are broadcast to an engine on another host, see `common.broadcast`.

There is one `BroadcastReceiver` in each scheduler process. Its two buffers are kept from sync to
sync: while a bucket is loaded out of one, the next arrives in the other.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from sglang_loader.common.broadcast.broadcast import Broadcast, BroadcastError
from sglang_loader.common.broadcast.update_group import abort
from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.session.messages import LoadBucket, SessionError

NUM_BUFFERS = 2


class BroadcastReceiver:
    """The receive buffers of this process, and which of its broadcasts have not ended."""

    def __init__(self) -> None:
        self._buffers = _no_buffers()
        self._unfinished: list[tuple[Any, Broadcast]] = []

    def start(self, index: int, nbytes: int, group: Any, device: torch.device) -> Broadcast:
        """Receive a bucket into the buffer of the one `NUM_BUFFERS` before, which is overwritten.

        Args:
            index: position of the bucket in its sync.
            nbytes: that come.
            group: the process group; the trainer is its rank 0.
            device: of the engine's weights.
        """
        slot = index % NUM_BUFFERS
        if self._buffers[slot].numel() < nbytes or self._buffers[slot].device != device:
            self._buffers[slot] = torch.empty(0, dtype=torch.uint8)  # free before growing
            self._buffers[slot] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        broadcast = Broadcast(self._buffers[slot][:nbytes], group)
        self._unfinished.append((group, broadcast))
        return broadcast

    def finished(self, broadcast: Broadcast) -> None:
        """All bytes of a broadcast are there."""
        self._unfinished = [found for found in self._unfinished if found[1] is not broadcast]

    def is_waiting_in(self, group: Any) -> bool:
        """True if a broadcast of this group has begun here and is not done: it may never be."""
        return any(found is group and not _is_over(each) for found, each in self._unfinished)

    def give_up(self, group: Any) -> None:
        """End a sync that failed; its group must not be used again.

        On a GPU a broadcast that goes on would block whatever frees memory there, such as the
        release of the KV cache. On a CPU it ends when the group is left: the trainer, whose own
        broadcast fails with it, first hears why.
        """
        if not self.is_waiting_in(group):
            self._forget(group)
        elif any(buffer.is_cuda for buffer in self._buffers):
            abort(group)
            self.left(group)
        else:
            self._buffers = _no_buffers()  # the next sync's; into the old ones bytes may still come

    def left(self, group: Any) -> None:
        """The group is gone, or aborted: give the memory back."""
        self._forget(group)
        self._buffers = _no_buffers()

    def _forget(self, group: Any) -> None:
        self._unfinished = [found for found in self._unfinished if found[0] is not group]


class BroadcastBuckets:
    """The buckets of one session that are broadcast; see `state.BucketMemory`.

    Args:
        receiver: of this process.
        group: the process group; the trainer is its rank 0.
        device: of the engine's weights.
        timeout_s: longest time that a broadcast may take, in seconds.
    """

    def __init__(
        self, receiver: BroadcastReceiver, group: Any, device: torch.device, timeout_s: float
    ) -> None:
        self._receiver = receiver
        self._group = group
        self._device = device
        self._timeout_s = timeout_s
        self._arriving: deque[tuple[int, Broadcast]] = deque()

    max_unread = NUM_BUFFERS

    def begin(self, message: LoadBucket, layout: BucketLayout) -> None:
        """Begin to receive a bucket.

        Raises:
            SessionError: it is not to come by broadcast.
        """
        if message.pieces or message.buffers or message.arranged:
            raise SessionError(f"bucket {message.index} of a session with a group is not broadcast")
        broadcast = self._receiver.start(message.index, layout.nbytes, self._group, self._device)
        self._arriving.append((message.index, broadcast))

    def has_come(self) -> bool:
        """True if the oldest bucket that was begun is there.

        Raises:
            BroadcastError: nothing came in time, or the trainer is gone.
        """
        index, broadcast = self._arriving[0]
        return broadcast.has_arrived(self._timeout_s, f"bucket {index}")

    def source(self, message: LoadBucket, nbytes: int) -> BucketSource:
        """The bytes of the oldest bucket that was begun, which has come."""
        _, broadcast = self._arriving.popleft()
        self._receiver.finished(broadcast)
        return BucketSource.flat(broadcast.flat)

    def let_go(self) -> bool:
        """Keep the buffers for the next session; see `state.BucketMemory`."""
        if not self._arriving:
            return False
        self._receiver.give_up(self._group)
        return True


def _no_buffers() -> list[torch.Tensor]:
    return [torch.empty(0, dtype=torch.uint8) for _ in range(NUM_BUFFERS)]


def _is_over(broadcast: Broadcast) -> bool:
    try:
        return broadcast.is_done()
    except BroadcastError:
        return False
