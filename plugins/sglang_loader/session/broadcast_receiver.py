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
from dataclasses import dataclass
from typing import Any

import torch

from sglang_loader.common.broadcast.broadcast import Broadcast, BroadcastError
from sglang_loader.common.broadcast.messages import BroadcastBucket
from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.check_remarks import LoadCounts
from sglang_loader.common.layout import BucketLayout, BucketTensor
from sglang_loader.common.manifest import BucketManifest, ManifestError, SyncSequence
from sglang_loader.session.model_loader import loader_of
from sglang_loader.upstream import engine_context, synchronize

logger = logging.getLogger(__name__)


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
            ManifestError: it is not the next one.
        """
        manifest = bucket.manifest
        if manifest.index == 0 and self._arriving is not None and self._arriving.group is not group:
            self.give_up()
        arriving = self._arriving
        if arriving is not None and (arriving.sync_id, arriving.index, arriving.nbytes) != (
            manifest.sync_id,
            manifest.index,
            manifest.nbytes,
        ):
            raise ManifestError(
                f"bucket {arriving.index} of sync {arriving.sync_id} was announced with "
                f"{arriving.nbytes} bytes, got bucket {manifest.index} of sync "
                f"{manifest.sync_id} with {manifest.nbytes}"
            )
        self._sequence.accept(manifest)

    def receive(self, bucket: BroadcastBucket, group: Any, device: torch.device) -> torch.Tensor:
        """Wait for the bucket's bytes, and start to receive the announced one.

        Args:
            bucket: one that `check` accepted.
            group: the process group; the trainer is its rank 0.
            device: of the engine's weights.

        Returns:
            uint8 of shape `[manifest.nbytes]`, valid until the bucket after the next.

        Raises:
            BroadcastError: nothing came within the bucket's `timeout_s`.
        """
        manifest = bucket.manifest
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            arriving = self._start(manifest.sync_id, manifest.index, manifest.nbytes, group, device)
        arriving.broadcast.wait(bucket.timeout_s, f"bucket {manifest.index}")
        self._unfinished.remove(arriving)
        if not manifest.last:
            self._arriving = self._start(
                manifest.sync_id, manifest.index + 1, bucket.next_nbytes, group, device
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
        manifest = bucket.manifest
        loader = loader_of(model)
        if manifest.index == 0:
            loader.start(
                engine_context(model),
                recheck_every_n_syncs=bucket.recheck_every_n_syncs,
                uses_plan=compiled,
            )
        source = BucketSource.flat(flat)
        loader.load(manifest.index, layout_of(manifest), source, read_only=False)
        outcome = loader.finish() if manifest.last else None
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


def layout_of(manifest: BucketManifest) -> BucketLayout:
    """A bucket's layout, as loaders take it."""
    tensors = []
    for entry in manifest.tensors:
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ManifestError(f"tensor {entry.name!r}: unknown dtype {entry.dtype!r}")
        tensors.append(BucketTensor(entry.name, entry.shape, dtype, entry.offset))
    return BucketLayout(tuple(tensors), manifest.nbytes)
