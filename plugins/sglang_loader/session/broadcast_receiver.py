"""The engine's part of disaggregated mode: receives broadcast buckets and loads them.

One `BroadcastReceiver` lives in each scheduler process. Two receive buffers are kept from sync to
sync: while a bucket is loaded out of one, the next arrives in the other, because the trainer
announces it (`BroadcastBucket.next_nbytes`) and its broadcast runs already.

    receiver.check(bucket, group)          # before any rank waits for bytes
    flat = receiver.receive(bucket, group, device)
    receiver.load(model, bucket, flat, compiled=False)
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from sglang_loader.common.broadcast.broadcast import Broadcast, BroadcastError
from sglang_loader.common.broadcast.messages import BroadcastBucket
from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.check_remarks import LoadCounts
from sglang_loader.common.layout import WireError
from sglang_loader.session.model_loader import loader_of
from sglang_loader.upstream import engine_context, synchronize

logger = logging.getLogger(__name__)

MAX_PAST_SYNCS = 1024


@dataclass(frozen=True)
class _Arriving:
    """A broadcast in progress: which bucket's, and in which group."""

    sync_id: str
    index: int
    broadcast: Broadcast
    group: Any

    @property
    def nbytes(self) -> int:
        return self.broadcast.flat.numel()


class BroadcastReceiver:
    """Receives the buckets of one engine process, in order."""

    def __init__(self) -> None:
        self._buffers = _no_buffers()
        self._arriving: _Arriving | None = None
        self._unfinished: list[_Arriving] = []
        self._sequence = SyncSequence()

    def is_waiting_in(self, group: Any) -> bool:
        """True if a broadcast of this group has begun here and is not done: it may never be."""
        return any(
            arriving.group is group and not _is_over(arriving.broadcast)
            for arriving in self._unfinished
        )

    def check(self, bucket: BroadcastBucket, group: Any) -> None:
        """Refuse a bucket that is repeated, skipped or of another sync.

        A first bucket in another group begins a new sync: the trainer of the one before is gone,
        and nobody has told this engine to leave its group.

        Raises:
            WireError: it is not the next one.
        """
        if bucket.index == 0 and self._arriving is not None and self._arriving.group is not group:
            self.give_up()
        arriving = self._arriving
        if arriving is not None and (arriving.sync_id, arriving.index, arriving.nbytes) != (
            bucket.sync_id,
            bucket.index,
            bucket.layout.nbytes,
        ):
            raise WireError(
                f"bucket {arriving.index} of sync {arriving.sync_id} was announced with "
                f"{arriving.nbytes} bytes, got bucket {bucket.index} of sync "
                f"{bucket.sync_id} with {bucket.layout.nbytes}"
            )
        self._sequence.accept(bucket)

    def receive(self, bucket: BroadcastBucket, group: Any, device: torch.device) -> torch.Tensor:
        """Wait for the bucket's bytes, and start to receive the announced one.

        Args:
            bucket: one that `check` accepted.
            group: the process group; the trainer is its rank 0.
            device: of the engine's weights.

        Returns:
            uint8 of shape `[bucket.layout.nbytes]`, valid until the bucket after the next.

        Raises:
            BroadcastError: nothing came within the bucket's `timeout_s`.
        """
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            arriving = self._start(
                bucket.sync_id, bucket.index, bucket.layout.nbytes, group, device
            )
        arriving.broadcast.wait(bucket.timeout_s, f"bucket {bucket.index}")
        self._unfinished.remove(arriving)
        if not bucket.is_last:
            self._arriving = self._start(
                bucket.sync_id, bucket.index + 1, bucket.next_nbytes, group, device
            )
        return arriving.broadcast.flat

    def load(
        self, model: Any, bucket: BroadcastBucket, flat: torch.Tensor, *, compiled: bool
    ) -> list[LoadCounts]:
        """Load a received bucket; returns when the device is done with the buffer.

        Args:
            model: the SGLang model.
            bucket: describes `flat`.
            flat: what `receive` returned.
            compiled: replay a load plan where one holds.

        Returns:
            After the last bucket how the sync's were loaded.

        Raises:
            Exception: what the model's `load_weights` raises.
        """
        loader = loader_of(model)
        if bucket.index == 0:
            loader.start(
                engine_context(model),
                recheck_every_n_syncs=bucket.recheck_every_n_syncs,
                uses_plan=compiled,
            )
        source = BucketSource.flat(flat)
        loader.load(bucket.index, bucket.layout, source, read_only=False)
        outcome = loader.finish() if bucket.is_last else None
        synchronize(flat.device)
        if outcome is None:
            return []
        logger.info(
            "broadcast sync: %d buckets replayed, %d loaded eagerly%s",
            outcome.num_replayed,
            outcome.num_eager,
            f": {outcome.reason}" if outcome.reason else "",
        )
        return [LoadCounts(outcome.num_replayed, outcome.num_eager, outcome.reason)]

    def give_up(self) -> None:
        """Forget the sync in progress; the group it ran on must not be used again."""
        self._arriving = None
        self._sequence.break_off()
        if self._unfinished:
            self._buffers = _no_buffers()  # the next sync's; into the old ones bytes may still come

    def left(self, group: Any) -> None:
        """The group is gone, or aborted: forget its sync, and give the memory back."""
        if self._arriving is not None and self._arriving.group is group:
            self.give_up()
        self._unfinished = [found for found in self._unfinished if found.group is not group]
        self._buffers = _no_buffers()

    def _start(
        self, sync_id: str, index: int, nbytes: int, group: Any, device: torch.device
    ) -> _Arriving:
        slot = index % 2
        if self._buffers[slot].numel() < nbytes or self._buffers[slot].device != device:
            self._buffers[slot] = torch.empty(0, dtype=torch.uint8)  # free before growing
            self._buffers[slot] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        broadcast = Broadcast(self._buffers[slot][:nbytes], group)
        arriving = _Arriving(sync_id, index, broadcast, group)
        self._unfinished.append(arriving)
        return arriving


def _no_buffers() -> list[torch.Tensor]:
    return [torch.empty(0, dtype=torch.uint8) for _ in range(2)]


def _is_over(broadcast: Broadcast) -> bool:
    try:
        return broadcast.is_done()
    except BroadcastError:
        return False


class SyncSequence:
    """Follows the buckets of one sync: each exactly once, in order, none left out.

    One per scheduler process. A new `sync_id` may only start with bucket 0, so a sync that broke
    off is replaced by the next one, never continued by it, and one that has begun never begins
    again.
    """

    def __init__(self) -> None:
        self._sync_id: str | None = None
        self._begun: deque[str] = deque(maxlen=MAX_PAST_SYNCS)
        self._next_index = 0
        self._num_tensors = 0

    def accept(self, bucket: BroadcastBucket) -> None:
        """Check that a bucket is the next one; call before its tensors are loaded.

        Raises:
            WireError: a bucket is missing, repeated or of another sync, or tensors were lost.
        """
        if bucket.index == 0 and bucket.sync_id != self._sync_id:
            if bucket.sync_id in self._begun:
                raise WireError(f"sync {bucket.sync_id} is over, its first bucket came again")
            self._begun.append(bucket.sync_id)
            self._sync_id, self._next_index, self._num_tensors = bucket.sync_id, 0, 0
        if (bucket.sync_id, bucket.index) != (self._sync_id, self._next_index):
            expected = "a new sync" if self._sync_id is None else f"sync {self._sync_id}"
            raise WireError(
                f"got bucket {bucket.index} of sync {bucket.sync_id}, expected bucket "
                f"{self._next_index} of {expected}"
            )
        self._next_index += 1
        self._num_tensors += len(bucket.layout.tensors)
        if self._num_tensors != bucket.num_tensors:
            raise WireError(
                f"after bucket {bucket.index} of sync {bucket.sync_id} "
                f"{self._num_tensors} tensors had come, the trainer had sent {bucket.num_tensors}"
            )
        if bucket.is_last:
            self.break_off()

    def break_off(self) -> None:
        """The sync in progress is over, complete or not."""
        self._sync_id, self._next_index = None, 0
