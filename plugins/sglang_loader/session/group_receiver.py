"""Receives the buckets that are broadcast or sent to an engine on another host."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_loader.common.broadcast.broadcast import (
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


@dataclass(frozen=True)
class _Arriving:
    """A bucket that is on its way in a group; `buffer`: all of what it is received into."""

    name: str
    group: Any
    buffer: torch.Tensor
    transfers: list[Transfer] = field(default_factory=list)

    def is_over(self) -> bool:
        """False if bytes may still come: also where a transfer has failed."""
        try:
            return all(transfer.is_done() for transfer in self.transfers)
        except BroadcastError:
            return False


class GroupReceiver:
    """How a session's buckets come that are broadcast or sent: into buffers of this process.

    The interface is that of `MappedMemory`: it serves one session after the other. Its two buffers
    are kept from sync to sync: while a bucket is loaded out of one, the next arrives in the other.
    """

    max_unread = NUM_BUFFERS

    def __init__(self) -> None:
        self._buffers = _no_buffers()
        self._sources = Sources()
        self._arriving: deque[_Arriving] = deque()
        self._unfinished: list[_Arriving] = []  # of sessions that are over
        self._group: Any = None
        self._senders: Any = None
        self._device = torch.device("cpu")
        self._timeout_s = 0.0

    def begin_session(
        self, group: Any, senders: Any, device: torch.device, timeout_s: float
    ) -> GroupReceiver:
        """Itself.

        Args:
            group: the trainer's first rank is its rank 0, and broadcasts.
            senders: the group of all trainer ranks; None where they do not send.
            device: of the buffers.
            timeout_s: longest time that a transfer may take, in seconds.
        """
        self._group, self._senders = group, senders
        self._device, self._timeout_s = device, timeout_s
        return self

    def begin(self, message: LoadBucket, layout: BucketLayout) -> None:
        """Begin to receive a bucket; SessionError is raised where it is to come neither by
        broadcast nor from all trainer ranks.
        """
        if message.buffers or (message.arranged and not message.receives):
            raise SessionError(f"bucket {message.index} of a session with a group is not sent")
        if message.receives:
            self._receive_parts(message)
            return
        arriving = self._arrives(message, self._group, layout.nbytes)
        flat = arriving.buffer[: layout.nbytes]
        arriving.transfers.append(Broadcast(flat, self._group))

    def _receive_parts(self, message: LoadBucket) -> None:
        group, receives = self._senders, message.receives
        if group is None or any(len(sizes) != group.size() for sizes in receives):
            raise SessionError(f"bucket {message.index} is sent by ranks that are in no group here")
        arriving = self._arrives(message, group, sum(map(sum, receives)))
        buffer, stop = arriving.buffer, 0
        for sizes in receives:
            start, stop = stop, stop + sum(sizes)
            work = all_to_all(buffer[:0], [0] * len(sizes), buffer[start:stop], sizes, group)
            arriving.transfers.append(Transfer(work, self._device))

    def _arrives(self, message: LoadBucket, group: Any, nbytes: int) -> _Arriving:
        """Note the next bucket before anything of it can come."""
        buffer = self._buffer(message.index, nbytes)
        self._arriving.append(_Arriving(f"bucket {message.index}", group, buffer))
        return self._arriving[-1]

    def _buffer(self, index: int, nbytes: int) -> torch.Tensor:
        """For the `index`-th bucket of a sync, at least `nbytes` long: the buffer of the bucket
        `NUM_BUFFERS` before, which is overwritten.
        """
        slot = index % NUM_BUFFERS
        if self._buffers[slot].numel() < nbytes or self._buffers[slot].device != self._device:
            self._sources.clear()
            self._buffers[slot] = torch.empty(0, dtype=torch.uint8)  # free before growing
            self._buffers[slot] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._buffers[slot]

    def has_come(self) -> bool:
        """True if the oldest bucket that was begun is there; BroadcastError is raised where nothing
        came in time, or a trainer rank is gone.
        """
        oldest = self._arriving[0]
        return all(each.has_arrived(self._timeout_s, oldest.name) for each in oldest.transfers)

    def source(self, message: LoadBucket, nbytes: int) -> BucketSource:
        """The bytes of the oldest bucket that was begun, which has come."""
        return self._sources.of(message, {0: self._arriving.popleft().buffer}, nbytes)

    def release(self) -> None:
        """End a session. The buffers are kept for the next one, but for those into which bytes may
        still come; the groups of these are no more use.

        On a GPU a transfer that goes on would block whatever frees memory there, such as the
        release of the KV cache. On a CPU it ends when the group is left: the trainer, whose own
        fails with it, first hears why.
        """
        unfinished = [each for each in self._arriving if not each.is_over()]
        self._arriving.clear()
        if not unfinished:
            return
        if self._device.type == "cuda":
            for group in {each.group for each in unfinished}:
                abort(group)
        else:
            self._unfinished += unfinished
        self._drop_buffers()

    def is_waiting_in(self, group: Any) -> bool:
        """True if a transfer in this group has begun here and is not done: it may never be."""
        return any(each.group is group and not each.is_over() for each in self._unfinished)

    def drop_group(self, group: Any) -> None:
        """The group is gone: give the memory back."""
        self._unfinished = [each for each in self._unfinished if each.group is not group]
        self._drop_buffers()

    def _drop_buffers(self) -> None:
        self._buffers = _no_buffers()
        self._sources.clear()


def _no_buffers() -> list[torch.Tensor]:
    return [torch.empty(0, dtype=torch.uint8) for _ in range(NUM_BUFFERS)]
