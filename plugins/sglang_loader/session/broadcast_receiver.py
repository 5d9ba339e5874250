"""Receives the buckets that are broadcast or sent to an engine on another host.

There is one `BroadcastReceiver` in each scheduler process. Its two buffers are kept from sync to
sync: while a bucket is loaded out of one, the next arrives in the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_loader.common.broadcast.broadcast import (
    WORD,
    Broadcast,
    BroadcastError,
    Transfer,
    all_to_all,
)
from sglang_loader.common.broadcast.update_group import abort
from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.session.messages import LoadBucket, SessionError
from sglang_loader.session.state import Sources

NUM_BUFFERS = 2


class BroadcastReceiver:
    """The receive buffers of this process, which of its transfers have not ended, and where buckets
    that were sent lie in those buffers (`sources`).
    """

    def __init__(self) -> None:
        self._buffers = _no_buffers()
        self._unfinished: list[tuple[Any, Transfer]] = []
        self.sources = Sources()

    def buffer(self, index: int, nbytes: int, device: torch.device) -> torch.Tensor:
        """For the `index`-th bucket of a sync, at least `nbytes` long: the buffer of the bucket
        `NUM_BUFFERS` before, which is overwritten.
        """
        slot = index % NUM_BUFFERS
        if self._buffers[slot].numel() < nbytes or self._buffers[slot].device != device:
            self.sources.clear()
            self._buffers[slot] = torch.empty(0, dtype=torch.uint8)  # free before growing
            self._buffers[slot] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._buffers[slot]

    def started(self, transfer: Transfer, group: Any) -> Transfer:
        """Note a transfer in a group; returns it."""
        self._unfinished.append((group, transfer))
        return transfer

    def finished(self, transfers: Sequence[Transfer]) -> None:
        """All bytes of some transfers are there."""
        self._unfinished = [found for found in self._unfinished if found[1] not in transfers]

    def is_waiting_in(self, group: Any) -> bool:
        """True if a transfer in this group has begun here and is not done: it may never be."""
        return any(found is group and not _is_over(each) for found, each in self._unfinished)

    def give_up(self, group: Any) -> None:
        """End a sync that failed; its group must not be used again.

        On a GPU a transfer that goes on would block whatever frees memory there, such as the
        release of the KV cache. On a CPU it ends when the group is left: the trainer, whose own
        fails with it, first hears why.
        """
        if not self.is_waiting_in(group):
            self._forget(group)
        elif any(buffer.is_cuda for buffer in self._buffers):
            abort(group)
            self.left(group)
        else:
            self._drop_buffers()  # the next sync has others: into these bytes may still come

    def left(self, group: Any) -> None:
        """The group is gone, or aborted: give the memory back."""
        self._forget(group)
        self._drop_buffers()

    def _drop_buffers(self) -> None:
        self._buffers = _no_buffers()
        self.sources.clear()

    def _forget(self, group: Any) -> None:
        self._unfinished = [found for found in self._unfinished if found[0] is not group]


@dataclass(frozen=True)
class _Arriving:
    """A bucket that is on its way; `buffer`: all of what it is received into."""

    name: str
    buffer: torch.Tensor
    transfers: list[Transfer]


class BroadcastBuckets:
    """The buckets of one session that are broadcast or sent; the interface of `MappedMemory`.

    Args:
        group: the trainer's first rank is its rank 0, and broadcasts.
        senders: the group of all trainer ranks; None where they do not send.
        timeout_s: longest time that a transfer may take, in seconds.
    """

    def __init__(
        self,
        receiver: BroadcastReceiver,
        group: Any,
        senders: Any,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._receiver = receiver
        self._group = group
        self._senders = senders
        self._device = device
        self._timeout_s = timeout_s
        self._arriving: deque[_Arriving] = deque()

    max_unread = NUM_BUFFERS

    def begin(self, message: LoadBucket, layout: BucketLayout) -> None:
        """Begin to receive a bucket; SessionError is raised where it is to come neither by
        broadcast nor from all trainer ranks.
        """
        receives = message.receives  # of nobody, where the plan reads nothing of the bucket
        has_pieces, has_parts = bool(message.pieces), any(map(any, receives))
        if message.buffers or has_pieces != has_parts or (message.arranged and not receives):
            raise SessionError(f"bucket {message.index} of a session with a group is not sent")
        receive = self._receive_parts if receives else self._receive_broadcast
        self._arriving.append(receive(message, layout))

    def _receive_broadcast(self, message: LoadBucket, layout: BucketLayout) -> _Arriving:
        buffer = self._receiver.buffer(message.index, layout.nbytes, self._device)
        flat = buffer[: layout.nbytes]
        transfer = self._receiver.started(Broadcast(flat, self._group), self._group)
        return _Arriving(f"bucket {message.index}", flat, [transfer])

    def _receive_parts(self, message: LoadBucket, layout: BucketLayout) -> _Arriving:
        group, receives = self._senders, message.receives
        if group is None or any(len(sizes) != group.size() for sizes in receives):
            raise SessionError(f"bucket {message.index} is sent by ranks that are in no group here")
        if any(nbytes < 0 or nbytes % WORD.itemsize for sizes in receives for nbytes in sizes):
            raise SessionError(f"bucket {message.index} is sent in parts of {receives} bytes")
        nbytes = sum(map(sum, receives))
        buffer, stop, transfers = self._receiver.buffer(message.index, nbytes, self._device), 0, []
        nothing = buffer[:0]
        for sizes in receives:
            start, stop = stop, stop + sum(sizes)
            work = all_to_all(nothing, [0] * len(sizes), buffer[start:stop], sizes, group)
            transfers.append(self._receiver.started(Transfer(work, self._device), group))
        return _Arriving(f"bucket {message.index}", buffer, transfers)

    def has_come(self) -> bool:
        """True if the oldest bucket that was begun is there; BroadcastError is raised where nothing
        came in time, or a trainer rank is gone.
        """
        oldest = self._arriving[0]
        return all(each.has_arrived(self._timeout_s, oldest.name) for each in oldest.transfers)

    def source(self, message: LoadBucket, nbytes: int) -> BucketSource:
        """The bytes of the oldest bucket that was begun, which has come."""
        oldest = self._arriving.popleft()
        self._receiver.finished(oldest.transfers)
        if not message.receives:
            return BucketSource.flat(oldest.buffer)
        return self._receiver.sources.of(message, {0: oldest.buffer}, nbytes)

    def let_go(self) -> bool:
        """Keep the buffers for the next session, but for those into which bytes may still come;
        True in that case.
        """
        if not self._arriving:
            return False
        for group in {self._group, self._senders} - {None}:
            self._receiver.give_up(group)
        return True


def _no_buffers() -> list[torch.Tensor]:
    return [torch.empty(0, dtype=torch.uint8) for _ in range(NUM_BUFFERS)]


def _is_over(transfer: Transfer) -> bool:
    try:
        return transfer.is_done()
    except BroadcastError:
        return False
