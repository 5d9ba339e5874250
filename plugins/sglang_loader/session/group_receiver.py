"""Reception of the buckets and rounds that are sent to an engine on other devices."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_loader.common.broadcast.broadcast import Broadcast, BroadcastError, Transfer, all_to_all
from sglang_loader.common.broadcast.update_group import abort
from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.session.messages import LoadBucket, LoadRound, SessionError
from sglang_loader.session.mapped_memory import SourceCache

NUM_BUFFERS = 2


@dataclass(frozen=True)
class _IncomingLoad:
    """A bucket or round that is being received in a process group, into `buffer`."""

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
        self._incoming: deque[_IncomingLoad] = deque()
        self._unfinished: list[_IncomingLoad] = []  # of sessions that are over
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
        """Begin to receive a bucket that is broadcast.

        Raises:
            SessionError: the bucket lies in memory of the trainer.
        """
        if message.buffers:
            raise SessionError(
                f"load {message.index} of a session with an update group is not broadcast"
            )
        incoming = self._add_incoming(message.index, self._group, layout.nbytes)
        flat = incoming.buffer[: layout.nbytes]
        incoming.transfers.append(Broadcast(flat, self._group))

    def begin_round(self, message: LoadRound) -> None:
        """Begin to receive a round that all trainer ranks send.

        Raises:
            SessionError: the round is of another group.
        """
        # Wrong sizes would block all ranks of the group, so they are refused first.
        group, sizes = self._senders, message.receives
        if group is None or len(sizes) != group.size():
            raise SessionError(
                f"load {message.index} is sent in a group of {len(sizes)} ranks, this engine is in "
                f"{'none' if group is None else f'one of {group.size()}'}"
            )
        buffer = self._add_incoming(message.index, group, sum(sizes)).buffer
        work = all_to_all(buffer[:0], [0] * len(sizes), buffer[: sum(sizes)], sizes, group)
        self._incoming[-1].transfers.append(Transfer(work, self._device))

    def _add_incoming(self, index: int, group: Any, nbytes: int) -> _IncomingLoad:
        """Add the next load, before any of its bytes can come."""
        self._incoming.append(_IncomingLoad(f"load {index}", group, self._buffer(index, nbytes)))
        return self._incoming[-1]

    def _buffer(self, index: int, nbytes: int) -> torch.Tensor:
        """Return the buffer for the `index`-th load of a session, at least `nbytes` long."""
        number = index % NUM_BUFFERS  # the buffer of the load that came `NUM_BUFFERS` before
        if self._buffers[number].numel() < nbytes or self._buffers[number].device != self._device:
            self._sources.clear()
            self._buffers[number] = torch.empty(0, dtype=torch.uint8)  # free before growing
            self._buffers[number] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._buffers[number]

    def has_arrived(self) -> bool:
        """Return True if the oldest load that was begun is complete.

        Raises:
            BroadcastError: the load did not come in time, or a trainer rank is gone.
        """
        oldest = self._incoming[0]
        return all(
            transfer.has_arrived(self._timeout_s, oldest.name) for transfer in oldest.transfers
        )

    def source(self, message: LoadBucket, nbytes: int) -> BucketSource:
        """Return the source of the oldest load, a bucket that has arrived."""
        return self._sources.of(message.index, self._incoming.popleft().buffer, nbytes)

    def buffer(self, message: LoadRound) -> torch.Tensor:
        """Return the buffer of the oldest load, a round that has arrived."""
        return self._incoming.popleft().buffer

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
