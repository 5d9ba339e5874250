"""Staging buffers of a session: buckets take turns in them, each packed by a few fused copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_loader.common.copies import synchronize
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.shared_memory import share_on_host
from verl_sglang_sync.sources.bucket_stream import Batch

LARGE_BYTES = 8 << 20
"""One `copy_` moves 1.85 TB/s on an H200, `_foreach_copy_` 1.46 (`copy_kernels` of the results)."""

MAPPABLE_BYTES = 1
"""A bucket of empty tensors has a buffer, too: no memory at all cannot be mapped."""

_Groups = list[tuple[list[int], list[torch.Tensor]]]


class StagingRing:
    """`num_buffers` flat staging buffers, kept from sync to sync or freed in between.

    Allocated by torch's ordinary allocator, never inside a torch_memory_saver region. On a GPU they
    must not lie in an expandable segment (no IPC handle could be exported): verl switches those off
    around a sync. On a CPU they are shared memory.

    Args:
        num_buffers: with two, a bucket is packed while the engine loads the one before.
        bucket_bytes: size of a buffer while the largest bucket is not known.
    """

    def __init__(self, device: torch.device, *, num_buffers: int, bucket_bytes: int) -> None:
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._buffers = [self._empty(0) for _ in range(num_buffers)]
        self._views: dict[tuple[str, int], _Groups] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held at present."""
        return sum(buffer.numel() for buffer in self._buffers)

    def prepare(self, sizes: Sequence[int]) -> None:
        """Make every buffer fit the buckets that are expected in it; `sizes` are their bytes."""
        num = len(self._buffers)
        for slot in range(min(num, len(sizes))):
            self._reserve(slot, max(MAPPABLE_BYTES, *sizes[slot::num]))

    def pack(self, batch: Batch) -> torch.UntypedStorage:
        """Copy a bucket into its buffer, wait for it, and return the buffer's storage."""
        slot, bucket = batch.index % len(self._buffers), batch.bucket
        nbytes = bucket.layout.nbytes
        needed = max(nbytes, MAPPABLE_BYTES)
        if needed > self._buffers[slot].numel():
            only = batch.index == 0 and bucket.is_last
            self._reserve(slot, needed if only else max(needed, self._bucket_bytes))
        groups = self._views.get((bucket.digest, slot))
        if groups is None:
            flat = self._buffers[slot][:nbytes]
            groups = self._views[bucket.digest, slot] = _grouped_views(bucket.layout, flat)
        with torch.no_grad():
            for members, targets in groups:
                sources = [batch.tensors[i] for i in members]
                if len(sources) == 1:
                    targets[0].copy_(sources[0], non_blocking=True)
                else:
                    torch._foreach_copy_(targets, sources, non_blocking=True)
        return self.written(batch.index)

    def buffer(self, index: int) -> torch.Tensor:
        """The buffer of a bucket; flat uint8, as long as `prepare` has made it."""
        return self._buffers[index % len(self._buffers)]

    def written(self, index: int) -> torch.UntypedStorage:
        """The storage of a bucket's buffer, once all that the current stream was given is there."""
        synchronize(self._device)
        return self.buffer(index).untyped_storage()

    def free(self) -> None:
        """Give the memory back; the engine must have let go of it."""
        self._views.clear()
        self._buffers = [self._empty(0) for _ in self._buffers]

    def _reserve(self, slot: int, nbytes: int) -> None:
        """Make a buffer at least so long; what is in it is lost when it grows."""
        if nbytes > self._buffers[slot].numel():
            self._views = {key: v for key, v in self._views.items() if key[1] != slot}
            self._buffers[slot] = self._empty(0)  # free before growing
            self._buffers[slot] = self._empty(nbytes)

    def _empty(self, nbytes: int) -> torch.Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return share_on_host(buffer) if nbytes and self._device.type == "cpu" else buffer


def _grouped_views(layout: BucketLayout, flat: torch.Tensor) -> _Groups:
    """Views of the buffer by dtype, which the fused copy takes one at a time; large ones alone."""
    by_dtype: dict[object, tuple[list[int], list[torch.Tensor]]] = {}
    for i, (_, view) in enumerate(layout.views(flat)):
        if view.numel():
            key = i if view.nbytes >= LARGE_BYTES else view.dtype
            members, views = by_dtype.setdefault(key, ([], []))
            members.append(i)
            views.append(view)
    return list(by_dtype.values())
