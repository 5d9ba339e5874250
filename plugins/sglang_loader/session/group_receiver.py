"""Reception of the buckets that are broadcast or sent to an engine on other devices."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_loader.common.broadcast.broadcast import Broadcast, BroadcastError, Transfer, all_to_all
from sglang_loader.common.broadcast.update_group import abort
from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.session.messages import LoadBucket, SessionError
from sglang_loader.session.mapped_memory import SourceCache

NUM_BUFFERS = 2


@dataclass(frozen=True)
class _IncomingBucket:
    """A bucket that is being received in a process group, into `buffer`."""

    name: str
    group: Any
    buffer: torch.Tensor
    transfers: list[Transfer] = field(default_factory=list)

    def is_over(self) -> bool:
        """Return False if bytes may still come, also after a transfer has failed."""
        try:
            return all(transfer.is_done() for transfer in self.transfers)
        except BroadcastError:
            return False


class GroupReceiver:
    """A receiver of buckets, with two buffers that are kept from sync to sync.

    While a bucket is loaded from one buffer, the next bucket comes into the other. The interface is
    that of `MappedMemory`.
    """

    max_unread = NUM_BUFFERS

    def __init__(self) -> None:
        self._buffers = _no_buffers()
        self._sources = SourceCache()
        self._incoming: deque[_IncomingBucket] = deque()
        self._unfinished: list[_IncomingBucket] = []  # of sessions that are over
        self._group: Any = None
        self._senders: Any = None
        self._device = torch.device("cpu")
        self._timeout_s = 0.0

    def begin_session(
        self, group: Any, senders: Any, device: torch.device, timeout_s: float
    ) -> GroupReceiver:
        """Begin a session, and return this receiver.

        Args:
            group: process group in which rank 0, the trainer's first rank, broadcasts.
            senders: process group in which all trainer ranks send, or None.
            device: of the buffers.
            timeout_s: longest time that a transfer may take, in seconds.
        """
        self._group, self._senders = group, senders
        self._device, self._timeout_s = device, timeout_s
        return self

    def begin_bucket(self, message: LoadBucket, layout: BucketLayout) -> None:
        """Begin to receive a bucket.

        Raises:
            SessionError: the bucket is neither broadcast nor sent by the trainer's ranks.
        """
        if message.buffers or (message.arranged and not message.receives):
            raise SessionError(
                f"bucket {message.index} of a session with an update group is neither broadcast "
                "whole nor sent by the trainer's ranks"
            )
        if message.receives:
            self._receive_parts(message)
            return
        incoming = self._add_incoming(message, self._group, layout.nbytes)
        flat = incoming.buffer[: layout.nbytes]
        incoming.transfers.append(Broadcast(flat, self._group))

    def _receive_parts(self, message: LoadBucket) -> None:
        # Wrong sizes would block all ranks of the group, so they are refused first.
        group, receives = self._senders, message.receives
        if group is None or any(len(sizes) != group.size() for sizes in receives):
            nums = " or ".join(map(str, {len(sizes) for sizes in receives}))
            raise SessionError(
                f"bucket {message.index} is sent in a group of {nums} ranks, this engine is in "
                f"{'none' if group is None else f'one of {group.size()}'}"
            )
        incoming = self._add_incoming(message, group, sum(map(sum, receives)))
        buffer, stop = incoming.buffer, 0
        for sizes in receives:
            start, stop = stop, stop + sum(sizes)
            work = all_to_all(buffer[:0], [0] * len(sizes), buffer[start:stop], sizes, group)
            incoming.transfers.append(Transfer(work, self._device))

    def _add_incoming(self, message: LoadBucket, group: Any, nbytes: int) -> _IncomingBucket:
        """Add the next bucket, before any of its bytes can come."""
        buffer = self._buffer(message.index, nbytes)
        self._incoming.append(_IncomingBucket(f"bucket {message.index}", group, buffer))
        return self._incoming[-1]

    def _buffer(self, index: int, nbytes: int) -> torch.Tensor:
        """Return the buffer for the `index`-th bucket of a sync, at least `nbytes` long."""
        number = index % NUM_BUFFERS  # the buffer of the bucket that came `NUM_BUFFERS` before
        if self._buffers[number].numel() < nbytes or self._buffers[number].device != self._device:
            self._sources.clear()
            self._buffers[number] = torch.empty(0, dtype=torch.uint8)  # free before growing
            self._buffers[number] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._buffers[number]

    def has_arrived(self) -> bool:
        """Return True if the oldest bucket that was begun is complete.

        Raises:
            BroadcastError: the bucket did not come in time, or a trainer rank is gone.
        """
        oldest = self._incoming[0]
        return all(
            transfer.has_arrived(self._timeout_s, oldest.name) for transfer in oldest.transfers
        )

    def source(self, message: LoadBucket, nbytes: int) -> BucketSource:
        """Return the source of the oldest bucket that was begun. The bucket must have arrived."""
        return self._sources.of(message, {0: self._incoming.popleft().buffer}, nbytes)

    def release(self) -> None:
        """End a session, and drop the buffers into which bytes may still come.

        The process groups of such transfers cannot be used any more.
        """
        unfinished = [bucket for bucket in self._incoming if not bucket.is_over()]
        self._incoming.clear()
        self._group = self._senders = None
        if not unfinished:
            return
        if self._device.type == "cuda":
            # A running transfer would block whatever frees GPU memory, such as the release of the
            # KV cache.
            for group in {bucket.group for bucket in unfinished}:
                abort(group)
        else:
            # These transfers end when the group is left, after the trainer has received the reason
            # of the failure. An abort here would make the trainer's own transfers fail first.
            self._unfinished += unfinished
        self._drop_buffers()

    def is_waiting_in(self, group: Any) -> bool:
        """Return True if a transfer of an ended session is still outstanding in this group."""
        return any(bucket.group is group and not bucket.is_over() for bucket in self._unfinished)

    def drop_group(self, group: Any) -> None:
        """Drop the references to a group that this process leaves, and free the buffers."""
        self._unfinished = [bucket for bucket in self._unfinished if bucket.group is not group]
        self._drop_buffers()

    def _drop_buffers(self) -> None:
        self._buffers = _no_buffers()
        self._sources.clear()


def _no_buffers() -> list[torch.Tensor]:
    return [torch.empty(0, dtype=torch.uint8) for _ in range(NUM_BUFFERS)]
