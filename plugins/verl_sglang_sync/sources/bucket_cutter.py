"""Cuts the trainer's export into buckets, and keeps the buckets for the next sync.

    cutter = BucketCutter(bucket_bytes)
    for batch in cutter.batches(export, report):
        pack(batch.bucket, batch.tensors)

The first sync cuts its export anew. A trainer exports the same names, shapes and dtypes at every
sync, so a later sync only compares its export with the kept buckets, a bucket at a time. From the
first difference on the export is cut anew, and so is the next one as a whole.

`BucketFiller` decides where a bucket ends, with the same result on every rank. A bucket is a run of
tensors whose bytes fit a limit. Two tensors that the engine's `load_weights` combines within one
call are in the same bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from sglang_loader.common.layout import BucketLayout, TensorSpec, digest_of, encode_layout
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.sources.export import NamedTensor

# Which tensors an engine's loader concatenates inside one `load_weights` call: if a bucket ends
# between them, its call-local cache drops both. Source: SGLang 0.5.14, deepseek_weight_loader.py
# (q_a with kv_a), longcat_flash.py (the same under numbered attentions) and deepseek_v4.py (wq_a
# with wkv, wkv with wgate).
_DEEPSEEK_MLA = tuple(
    (f".q_a_proj.{kind}", f".kv_a_proj_with_mqa.{kind}")
    for kind in ("weight", "weight_scale_inv", "weight_scale")
)
_DEEPSEEK_V4 = tuple(
    (f".{attention}.{first}", f".{attention}.{second}")
    for attention in ("self_attn", "attn")
    for first, second in (
        ("wq_a.weight", "wkv.weight"),
        ("wq_a.scale", "wkv.scale"),
        ("wq_a.weight_scale_inv", "wkv.weight_scale_inv"),
        ("compressor.wkv.weight", "compressor.wgate.weight"),
        ("indexer.compressor.wkv.weight", "indexer.compressor.wgate.weight"),
    )
)
FUSED_PAIRS = _DEEPSEEK_MLA + _DEEPSEEK_V4
"""Suffixes of the names of two tensors. The names are equal before the suffix."""

_FIRST_OF_PAIR = {suffix: pair[0] for pair in FUSED_PAIRS for suffix in pair}
_PAIRED = tuple(_FIRST_OF_PAIR)


class BucketFiller:
    """Filler of buckets, one after the other: `add` every tensor, then `finish`.

    Args:
        bucket_bytes: size limit of a bucket, at least 1. A tensor or fused pair that is larger
            gets a bucket to itself.
    """

    def __init__(self, *, bucket_bytes: int) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes}: expected at least 1")
        self._limit = bucket_bytes
        self._waiting: dict[str, TensorSpec] = {}  # tensors whose fused partner is still to come
        self._open: list[TensorSpec] = []
        self._open_bytes = 0
        self._names: set[str] = set()

    def add(self, spec: TensorSpec) -> list[BucketLayout]:
        """Take the next tensor, and return the buckets that are complete (none or one).

        Raises:
            ValueError: a tensor of this name was added before.
        """
        name, _, _ = spec
        if name in self._names:
            raise ValueError(f"tensor {name!r} was exported twice in one sync")
        self._names.add(name)
        if (pair := _pair_of(name)) is None:
            return self._place([spec])
        if (partner := self._waiting.pop(pair, None)) is None:
            self._waiting[pair] = spec
            return []
        return self._place([partner, spec])

    def finish(self) -> list[BucketLayout]:
        """Return all buckets that are left. The last one, if any, ends the export."""
        # A partner may never come, as in a DeepSeek without q_a. No tensor may be lost.
        closed = [layout for spec in self._waiting.values() for layout in self._place([spec])]
        self._waiting.clear()
        return [*closed, self._close()] if self._open else closed

    def _place(self, unit: list[TensorSpec]) -> list[BucketLayout]:
        """Put a tensor or fused pair into a bucket. Close the open bucket first if it is full."""
        unit_bytes = BucketLayout.pack(unit).nbytes
        is_full = bool(self._open) and self._open_bytes + unit_bytes > self._limit
        closed = [self._close()] if is_full else []
        self._open += unit
        self._open_bytes += unit_bytes
        return closed

    def _close(self) -> BucketLayout:
        layout = BucketLayout.pack(self._open)
        self._open, self._open_bytes = [], 0
        return layout


def _pair_of(name: str) -> str | None:
    """Return the name of the first tensor of this tensor's fused pair, or None without a pair."""
    if not name.endswith(_PAIRED):  # most tensors: one call is faster than a loop
        return None
    suffix = next(suffix for suffix in _PAIRED if name.endswith(suffix))
    return name.removesuffix(suffix) + _FIRST_OF_PAIR[suffix]


@dataclass(frozen=True)
class Bucket:
    """A bucket without its tensors, for all exports with the same names, shapes and dtypes.

    Attributes:
        encoded: the layout as a message carries it.
        digest: name of the layout, equal for equal layouts.
        payload_bytes: bytes of the tensors alone, without gaps.
        is_last: True if the export ended with this bucket.
    """

    layout: BucketLayout
    encoded: bytes
    digest: str
    payload_bytes: int
    is_last: bool

    @classmethod
    def of(cls, layout: BucketLayout, *, is_last: bool) -> Bucket:
        encoded = encode_layout(layout)
        payload = sum(tensor.nbytes for tensor in layout.tensors)
        return cls(layout, encoded, digest_of(encoded), payload, is_last)


@dataclass(frozen=True)
class Batch:
    """One bucket of one sync, with its tensors in the order of `bucket.layout.tensors`."""

    index: int
    bucket: Bucket
    tensors: list[torch.Tensor]

    @property
    def named(self) -> Iterator[NamedTensor]:
        names = (tensor.name for tensor in self.bucket.layout.tensors)
        return zip(names, self.tensors, strict=True)


@dataclass(frozen=True)
class CachedBucket:
    """A bucket of the last sync, with the part of the export that was consumed for it.

    Attributes:
        columns: names, shapes and dtypes of the tensors that came since the last bucket. With fused
            pairs they may be other tensors than those of the bucket.
    """

    bucket: Bucket
    columns: tuple[list[Any], ...]


class BucketCutter:
    """Cutter of one trainer rank's exports into buckets, sync after sync.

    Attributes:
        buckets: the buckets of the last sync. The next sync has the same ones if its export is the
            same. Empty during an export, and after one that did not come to its end.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.buckets: list[Bucket] = []
        self._bucket_bytes = bucket_bytes
        self._cached: list[CachedBucket] | None = None

    def batches(self, weights: Iterable[NamedTensor], report: SyncReport) -> Iterator[Batch]:
        """Yield the buckets of `weights` in order.

        Only the tensors of one bucket are held at a time, and the tensor that closed the bucket.
        """
        source = iter(weights)
        # Nothing is kept of a sync that breaks off.
        cached, self._cached, self.buckets = self._cached, None, []
        batches = self._filled(source, [], 0, report)
        if cached is not None:
            batches = self._compared(source, cached, report)
        sent: list[Bucket] = []

        def noted(batch: Batch) -> Batch:
            sent.append(batch.bucket)
            return batch

        # The variable of a loop would hold the tensors while they are sent.
        yield from map(noted, batches)
        self.buckets = sent

    def _compared(
        self, source: Iterator[NamedTensor], cached: list[CachedBucket], report: SyncReport
    ) -> Iterator[Batch]:
        """Yield the buckets of the last sync for as long as the export is the same."""
        held: dict[str, torch.Tensor] = {}
        for index, entry in enumerate(cached):
            with report.stage("export"):
                tensors = list(islice(source, len(entry.columns[0])))
                is_same = _columns(tensors) == entry.columns
                # The export may have more tensors than last time. Only its end shows that.
                surplus = list(islice(source, 1)) if is_same and entry.bucket.is_last else []
            if not is_same or surplus:
                unsent = [*held.items(), *tensors, *surplus]
                del held, tensors, surplus  # `_filled` frees the tensors one after the other
                yield from self._filled(source, unsent, index, report)
                # These buckets begin amid an export. The next sync cuts its export from the start.
                self._cached = None
                return
            held.update(tensors)
            del tensors
            yield _batch(held, index, entry.bucket)
        self._cached = cached

    def _filled(
        self,
        source: Iterator[NamedTensor],
        first: list[NamedTensor],
        index: int,
        report: SyncReport,
    ) -> Iterator[Batch]:
        """Cut and yield the buckets of `first` and the rest of the export, from `index` on."""
        filler, cached = BucketFiller(bucket_bytes=self._bucket_bytes), list[CachedBucket]()
        held: dict[str, torch.Tensor] = {}
        consumed: list[NamedTensor] = []  # since the last bucket

        def cut(layout: BucketLayout, *, is_last: bool) -> Batch:
            bucket = Bucket.of(layout, is_last=is_last)
            cached.append(CachedBucket(bucket, _columns(consumed)))
            consumed.clear()
            return _batch(held, index + len(cached) - 1, bucket)

        first.reverse()  # `pop` takes from the end, and keeps no reference
        while True:
            with report.stage("export"):
                item = first.pop() if first else next(source, None)
            if item is None:
                break
            name, tensor = item
            closed = filler.add((name, tensor.shape, tensor.dtype))
            held[name] = tensor
            consumed.append(item)
            del item, tensor  # while the consumer packs, only `held` keeps tensors
            for layout in closed:
                yield cut(layout, is_last=False)
        layouts = filler.finish()
        for layout in layouts:
            yield cut(layout, is_last=layout is layouts[-1])
        self._cached = cached or None


def _batch(held: dict[str, torch.Tensor], index: int, bucket: Bucket) -> Batch:
    return Batch(index, bucket, [held.pop(entry.name) for entry in bucket.layout.tensors])


def _columns(tensors: Sequence[NamedTensor]) -> tuple[list[Any], ...]:
    """Return the names, shapes and dtypes of tensors, to be compared with `==`."""
    # A list for each property is quicker than a tuple for each tensor.
    return (
        [name for name, _ in tensors],
        [tensor.shape for _, tensor in tensors],
        [tensor.dtype for _, tensor in tensors],
    )
