"""Staging buffers, into which buckets are packed in turn by a few fused copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_loader.common.copies.strided import synchronize
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.shared_memory import share_on_host
from verl_sglang_sync.sources.bucket_cutter import Batch

LARGE_BYTES = 8 << 20
"""The size from which a tensor gets a `copy_` of its own.

On an H200 one `copy_` moves 1.85 TB/s, `_foreach_copy_` 1.46 (`copy_kernels` in the results).
"""

MAPPABLE_BYTES = 1
"""The least size of a buffer, because engines cannot map an empty one."""

_Groups = list[tuple[list[int], list[torch.Tensor]]]


class StagingRing:
    """`num_buffers` flat staging buffers, kept from sync to sync or freed in between.

    Torch's ordinary allocator allocates the buffers, never inside a torch_memory_saver region. On a
    GPU the buffers must not lie in an expandable segment, which has no IPC handle. verl switches
    expandable segments off around a sync. On a CPU the buffers are shared memory.

    Args:
        num_buffers: with two buffers, a bucket is packed while the engine loads the previous one.
        bucket_bytes: size of a buffer until the largest bucket is known.
    """

    def __init__(self, device: torch.device, *, num_buffers: int, bucket_bytes: int) -> None:
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._buffers = [self._empty(0) for _ in range(num_buffers)]
        self._views: dict[tuple[str, int], _Groups] = {}

    @property
    def num_buffers(self) -> int:
        return len(self._buffers)

    @property
    def nbytes(self) -> int:
        """The present size of all buffers."""
        return sum(buffer.numel() for buffer in self._buffers)

    def prepare(self, sizes: Sequence[int]) -> None:
        """Make every buffer large enough for its buckets, given the bytes of all buckets."""
        num = len(self._buffers)
        for slot in range(min(num, len(sizes))):
            self._reserve(slot, max(MAPPABLE_BYTES, *sizes[slot::num]))

    def pack(self, batch: Batch) -> torch.UntypedStorage:
        """Copy a bucket into its buffer, wait for the copies, and return the buffer's storage."""
        slot, bucket = batch.index % len(self._buffers), batch.bucket
        nbytes = bucket.layout.nbytes
        needed = max(nbytes, MAPPABLE_BYTES)
        if needed > self._buffers[slot].numel():
            is_only = batch.index == 0 and bucket.is_last
            self._reserve(slot, needed if is_only else max(needed, self._bucket_bytes))
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
        """Return the buffer of a bucket: flat uint8, with the size that `prepare` has made."""
        return self._buffers[index % len(self._buffers)]

    def written(self, index: int) -> torch.UntypedStorage:
        """Wait for the current stream, and return the storage of a bucket's buffer."""
        synchronize(self._device)
        return self.buffer(index).untyped_storage()

    def free(self) -> None:
        """Free the buffers, which engines must have unmapped."""
        self._views.clear()
        self._buffers = [self._empty(0) for _ in self._buffers]

    def _reserve(self, slot: int, nbytes: int) -> None:
        """Make a buffer at least this large. A buffer that grows loses its content."""
        if nbytes > self._buffers[slot].numel():
            self._views = {key: view for key, view in self._views.items() if key[1] != slot}
            self._buffers[slot] = self._empty(0)  # free before growing
            self._buffers[slot] = self._empty(nbytes)

    def _empty(self, nbytes: int) -> torch.Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return share_on_host(buffer) if nbytes and self._device.type == "cpu" else buffer


def _grouped_views(layout: BucketLayout, flat: torch.Tensor) -> _Groups:
    """Group a bucket's tensors for fused copies: by dtype, but each large tensor alone.

    Returns:
        The positions and the views of the tensors in each group.
    """
    by_dtype: dict[object, tuple[list[int], list[torch.Tensor]]] = {}
    for i, (_, view) in enumerate(layout.views(flat)):
        if view.numel():
            key = i if view.nbytes >= LARGE_BYTES else view.dtype
            members, views = by_dtype.setdefault(key, ([], []))
            members.append(i)
            views.append(view)
    return list(by_dtype.values())
