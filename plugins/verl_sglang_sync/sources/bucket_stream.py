"""Cuts the trainer's export into buckets, and remembers how: the next sync is cut by comparison.

Planning and describing 18,867 tensors costs 0.2 s of Python. A trainer exports the same names,
shapes and dtypes at every sync, so the first sync's buckets are kept, and a later one only checks
that the stream is the same, a bucket at a time:

    stream = BucketStream(bucket_bytes)
    for batch in stream.batches(export, report):
        pack(batch.bucket, batch.tensors)

Where the stream differs, what was not sent yet is planned anew, and so is the next sync.

`BucketPlanner` cuts: pure, and the same on every rank. A bucket is a run of tensors whose bytes fit
a limit, but two tensors that the engine's `load_weights` combines within one call stay together.
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
"""Suffixes of two tensors' names that are equal otherwise."""

_FIRST_OF_PAIR = {suffix: pair[0] for pair in FUSED_PAIRS for suffix in pair}
_PAIRED = tuple(_FIRST_OF_PAIR)


class BucketPlanner:
    """Greedy, order-preserving planner: `add` every tensor, then `finish`.

    The first tensor of a fused pair waits for the other. If that never comes (a DeepSeek without
    q_a, say), `finish` places the one that waits, so no tensor is ever lost.

    Args:
        bucket_bytes: at least 1; a unit larger than that gets a bucket to itself.
    """

    def __init__(self, *, bucket_bytes: int) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes}: expected at least 1")
        self._limit = bucket_bytes
        self._waiting: dict[str, TensorSpec] = {}
        self._open: list[TensorSpec] = []
        self._open_bytes = 0
        self._names: set[str] = set()

    def add(self, spec: TensorSpec) -> list[BucketLayout]:
        """Take the next tensor; return the buckets (none or one) that it closes."""
        name, _, _ = spec
        if name in self._names:
            raise ValueError(f"tensor {name!r} was exported twice in one sync")
        self._names.add(name)
        if (pair := _pair_of(name)) is None:
            return self._place([spec])
        if (other := self._waiting.pop(pair, None)) is None:
            self._waiting[pair] = spec
            return []
        return self._place([other, spec])

    def finish(self) -> list[BucketLayout]:
        """Place what still waits; the last bucket returned, if any, is the final one."""
        closed = [layout for spec in self._waiting.values() for layout in self._place([spec])]
        self._waiting.clear()
        return [*closed, self._close()] if self._open else closed

    def _place(self, unit: list[TensorSpec]) -> list[BucketLayout]:
        """Put an indivisible run of tensors into the open bucket; close a full one first."""
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
    """The name of a fused pair's first tensor, given either; None: it is in no pair."""
    if not name.endswith(_PAIRED):  # as most: faster than to ask for each
        return None
    suffix = next(suffix for suffix in _PAIRED if name.endswith(suffix))
    return name.removesuffix(suffix) + _FIRST_OF_PAIR[suffix]


@dataclass(frozen=True)
class Bucket:
    """A planned bucket, described once for as long as the stream stays the same.

    Attributes:
        digest: names the layout.
        payload_bytes: bytes of the tensors alone.
        is_last: the export ended with it.
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
    """One bucket of one sync: `tensors[i]` belongs to `bucket.layout.tensors[i]`."""

    index: int
    bucket: Bucket
    tensors: list[torch.Tensor]

    @property
    def named(self) -> Iterator[NamedTensor]:
        names = (tensor.name for tensor in self.bucket.layout.tensors)
        return zip(names, self.tensors, strict=True)


@dataclass(frozen=True)
class Cut:
    """A bucket, and the names, shapes and dtypes of the tensors that were read before it closed."""

    bucket: Bucket
    columns: tuple[list[Any], ...]


class BucketStream:
    """Buckets of one trainer rank, sync after sync.

    Attributes:
        buckets: those of the last sync, and of the next one if its stream is the same; empty during
            a sync, and after one that broke off.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.buckets: list[Bucket] = []
        self._bucket_bytes = bucket_bytes
        self._cuts: list[Cut] | None = None

    def batches(self, weights: Iterable[NamedTensor], report: SyncReport) -> Iterator[Batch]:
        """Yield the buckets of `weights` in order; one bucket and what closes it is held."""
        source = iter(weights)
        cuts, self._cuts, self.buckets = self._cuts, None, []  # they stay so if the sync breaks off
        batches = self._planned(source, [], 0, report)
        if cuts is not None:
            batches = self._compared(source, cuts, report)
        sent: list[Bucket] = []

        def noted(batch: Batch) -> Batch:
            sent.append(batch.bucket)
            return batch

        yield from map(noted, batches)  # a loop would hold the tensors while they are sent
        self.buckets = sent

    def _compared(
        self, source: Iterator[NamedTensor], cuts: list[Cut], report: SyncReport
    ) -> Iterator[Batch]:
        held: dict[str, torch.Tensor] = {}
        for index, cut in enumerate(cuts):
            with report.stage("export"):
                read = list(islice(source, len(cut.columns[0])))
                is_same = _columns(read) == cut.columns
                # What ended the export before may not end it now: only the end itself tells.
                more = list(islice(source, 1)) if is_same and cut.bucket.is_last else []
            if not is_same or more:
                unsent = [*held.items(), *read, *more]
                del held, read, more
                yield from self._planned(source, unsent, index, report)
                self._cuts = None
                return
            held.update(read)
            del read
            yield _batch(held, index, cut.bucket)
        self._cuts = cuts

    def _planned(
        self,
        source: Iterator[NamedTensor],
        first: list[NamedTensor],
        index: int,
        report: SyncReport,
    ) -> Iterator[Batch]:
        planner, cuts = BucketPlanner(bucket_bytes=self._bucket_bytes), list[Cut]()
        held: dict[str, torch.Tensor] = {}
        read: list[NamedTensor] = []  # since the last cut

        def cut(layout: BucketLayout, *, is_last: bool) -> Batch:
            bucket = Bucket.of(layout, is_last=is_last)
            cuts.append(Cut(bucket, _columns(read)))
            read.clear()
            return _batch(held, index + len(cuts) - 1, bucket)

        first.reverse()
        while True:
            with report.stage("export"):
                item = first.pop() if first else next(source, None)
            if item is None:
                break
            name, tensor = item
            closed = planner.add((name, tensor.shape, tensor.dtype))
            held[name] = tensor
            read.append(item)
            del item, tensor
            for layout in closed:
                yield cut(layout, is_last=False)
        rest = planner.finish()
        for layout in rest:
            yield cut(layout, is_last=layout is rest[-1])
        self._cuts = cuts or None


def _batch(held: dict[str, torch.Tensor], index: int, bucket: Bucket) -> Batch:
    return Batch(index, bucket, [held.pop(entry.name) for entry in bucket.layout.tensors])


def _columns(tensors: Sequence[NamedTensor]) -> tuple[list[Any], ...]:
    """What is compared: a list for each property is quicker than a tuple for each tensor."""
    return (
        [name for name, _ in tensors],
        [tensor.shape for _, tensor in tensors],
        [tensor.dtype for _, tensor in tensors],
    )
