"""Staging buffers: buckets are packed into them one after the other, by a few fused copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_loader.common.copies.strided import synchronize
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.shared_memory import share_on_host
from verl_sglang_sync.sources.bucket_cutter import Batch

LARGE_BYTES = 8 << 20
"""One `copy_` moves 1.85 TB/s on an H200, `_foreach_copy_` 1.46 (`copy_kernels` of the results)."""

MAPPABLE_BYTES = 1
"""Least size of a buffer, also for a bucket of empty tensors: no memory cannot be mapped."""

_Groups = list[tuple[list[int], list[torch.Tensor]]]


class StagingRing:
    """`num_buffers` flat staging buffers, kept from sync to sync or freed in between.

    They are allocated by torch's ordinary allocator, never inside a torch_memory_saver region. On a
    GPU they must not lie in an expandable segment, which has no IPC handle: verl switches those off
    around a sync. On a CPU they are shared memory.

    Args:
        num_buffers: with two, a bucket is packed while the engine loads the last one.
        bucket_bytes: size of a buffer as long as the largest bucket is not known.
    """

    def __init__(self, device: torch.device, *, num_buffers: int, bucket_bytes: int) -> None:
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._buffers = [self._empty(0) for _ in range(num_buffers)]
        self._views: dict[tuple[str, int], _Groups] = {}

    @property
    def nbytes(self) -> int:
        """Size of the buffers at present."""
        return sum(buffer.numel() for buffer in self._buffers)

    def prepare(self, sizes: Sequence[int]) -> None:
        """Make every buffer large enough for its buckets, given the bytes of all buckets."""
        num = len(self._buffers)
        for slot in range(min(num, len(sizes))):
            self._reserve(slot, max(MAPPABLE_BYTES, *sizes[slot::num]))

    def pack(self, batch: Batch) -> torch.UntypedStorage:
        """Copy a bucket into its buffer, wait for that, and return the buffer's storage."""
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
        """The buffer of a bucket: flat uint8, of the size that `prepare` has made."""
        return self._buffers[index % len(self._buffers)]

    def written(self, index: int) -> torch.UntypedStorage:
        """The storage of a bucket's buffer, after the current stream's work is done."""
        synchronize(self._device)
        return self.buffer(index).untyped_storage()

    def free(self) -> None:
        """Free the buffers, which engines must have unmapped."""
        self._views.clear()
        self._buffers = [self._empty(0) for _ in self._buffers]

    def _reserve(self, slot: int, nbytes: int) -> None:
        """Make a buffer at least this large; its content is lost if it grows."""
        if nbytes > self._buffers[slot].numel():
            self._views = {key: v for key, v in self._views.items() if key[1] != slot}
            self._buffers[slot] = self._empty(0)  # free before growing
            self._buffers[slot] = self._empty(nbytes)

    def _empty(self, nbytes: int) -> torch.Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return share_on_host(buffer) if nbytes and self._device.type == "cpu" else buffer


def _grouped_views(layout: BucketLayout, flat: torch.Tensor) -> _Groups:
    """Positions and views of a bucket's tensors in groups, each for one fused copy: by dtype, and
    large tensors alone.
    """
    by_dtype: dict[object, tuple[list[int], list[torch.Tensor]]] = {}
    for i, (_, view) in enumerate(layout.views(flat)):
        if view.numel():
            key = i if view.nbytes >= LARGE_BYTES else view.dtype
            members, views = by_dtype.setdefault(key, ([], []))
            members.append(i)
            views.append(view)
    return list(by_dtype.values())
