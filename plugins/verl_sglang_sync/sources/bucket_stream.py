"""Cuts the trainer's export into buckets, and remembers how: the next sync is cut by comparison.

Planning and describing 18,867 tensors costs 0.2 s of Python. A trainer exports the same names,
shapes and dtypes at every sync, so the first sync's buckets are kept, and a later one only checks
that the stream is the same, a bucket at a time:

    stream = BucketStream(bucket_bytes)
    for batch in stream.batches(export, report):
        pack(batch.bucket, batch.tensors)

Where the stream differs, what was not sent yet is planned anew, and so is the next sync.

`BucketPlanner` cuts: pure, and the same on every rank. A bucket is a run of tensors whose bytes fit
a limit, but tensors that the engine's `load_weights` combines within one call (a fusion group) stay
together.
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

FusionGroup = tuple[str, ...]
"""Name suffixes of tensors that share a prefix and must travel together."""

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
FUSION_GROUPS: tuple[FusionGroup, ...] = _DEEPSEEK_MLA + _DEEPSEEK_V4


class BucketPlanner:
    """Greedy, order-preserving planner: `add` every tensor, then `finish`.

    A tensor of a fusion group waits until its group is whole. A group that never becomes whole
    (a DeepSeek without q_a, say) is placed by `finish`, so no tensor is ever lost.

    Args:
        bucket_bytes: at least 1; a unit larger than that gets a bucket to itself.
    """

    def __init__(
        self, *, bucket_bytes: int, fusion_groups: tuple[FusionGroup, ...] = FUSION_GROUPS
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes}: expected at least 1")
        self._limit = bucket_bytes
        self._members = {
            suffix: (position, len(group))
            for position, group in enumerate(fusion_groups)
            for suffix in group
        }
        self._suffixes = tuple(self._members)
        self._waiting: dict[tuple[str, int], list[TensorSpec]] = {}
        self._open: list[TensorSpec] = []
        self._open_bytes = 0
        self._names: set[str] = set()

    def add(self, spec: TensorSpec) -> list[BucketLayout]:
        """Take the next tensor; return the buckets (none or one) that it closes."""
        name, _, _ = spec
        if name in self._names:
            raise ValueError(f"tensor {name!r} was exported twice in one sync")
        self._names.add(name)
        key, size = self._find_group(name)
        if key is None:
            return self._place([spec])
        unit = self._waiting.setdefault(key, [])
        unit.append(spec)
        return self._place(self._waiting.pop(key)) if len(unit) == size else []

    def finish(self) -> list[BucketLayout]:
        """Place what still waits; the last bucket returned, if any, is the final one."""
        closed = [layout for unit in self._waiting.values() for layout in self._place(unit)]
        self._waiting.clear()
        return [*closed, self._close()] if self._open else closed

    def _find_group(self, name: str) -> tuple[tuple[str, int] | None, int]:
        if not name.endswith(self._suffixes):
            return None, 1
        # the longest wins: `.indexer.compressor.wkv.weight` over `.compressor.wkv.weight`
        suffix = max((s for s in self._suffixes if name.endswith(s)), key=len)
        position, size = self._members[suffix]
        return (name.removesuffix(suffix), position), size

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


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How the stream becomes one bucket: read up to position `stop`, take `positions`.

    Attributes:
        positions: in the stream, in loading order.
        columns: names, shapes and dtypes of the tensors read for this cut.
    """

    bucket: Bucket
    stop: int
    positions: tuple[int, ...]
    columns: tuple[list[Any], ...]


class BucketStream:
    """Buckets of one trainer rank, sync after sync."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._cuts: list[Cut] | None = None

    @property
    def buckets(self) -> list[Bucket]:
        """What the next sync will be cut into if its stream is the same; empty if unknown."""
        return [cut.bucket for cut in self._cuts or ()]

    def batches(self, weights: Iterable[NamedTensor], report: SyncReport) -> Iterator[Batch]:
        """Yield the buckets of `weights` in order; one bucket and what closes it is held."""
        source = iter(weights)
        cuts, self._cuts = self._cuts, None  # stays None where the sync breaks off
        if cuts is None:
            batches = self._planned(source, [], 0, report)
        else:
            batches = self._compared(source, cuts, report)
        for batch in batches:
            report.count_bucket(len(batch.tensors), batch.bucket.payload_bytes)
            yield batch
            del batch  # the next bucket is exported when this one may be gone

    def _compared(
        self, source: Iterator[NamedTensor], cuts: list[Cut], report: SyncReport
    ) -> Iterator[Batch]:
        held: list[NamedTensor | None] = []
        for index, cut in enumerate(cuts):
            with report.stage("export"):
                chunk = list(islice(source, cut.stop - len(held)))
                is_same = _columns(chunk) == cut.columns
                # What ended the export before may not end it now: only the end itself tells.
                more = list(islice(source, 1)) if is_same and cut.bucket.is_last else []
            held += chunk
            del chunk
            if not is_same or more:
                unsent = [pair for pair in held if pair is not None]
                del held
                yield from self._planned(source, unsent + more, index, report)
                self._cuts = None
                return
            tensors = [held[i][1] for i in cut.positions]  # type: ignore[index]
            for position in cut.positions:
                held[position] = None
            batch = Batch(index, cut.bucket, tensors)
            del tensors
            yield batch
            del batch
        self._cuts = cuts

    def _planned(
        self,
        source: Iterator[NamedTensor],
        first: list[NamedTensor],
        index: int,
        report: SyncReport,
    ) -> Iterator[Batch]:
        planner = BucketPlanner(bucket_bytes=self._bucket_bytes)
        record = _Recorder()
        first.reverse()
        while True:
            with report.stage("export"):
                item = first.pop() if first else next(source, None)
            if item is None:
                break
            name, tensor = item
            closed = planner.add((name, tensor.shape, tensor.dtype))
            record.add(name, tensor)
            del item, tensor
            for layout in closed:
                yield record.cut(layout, index, is_last=False)
                index += 1
        rest = planner.finish()
        for position, layout in enumerate(rest, start=1):
            yield record.cut(layout, index, is_last=position == len(rest))
            index += 1
        self._cuts = record.cuts or None


class _Recorder:
    """Remembers the stream while it is planned."""

    def __init__(self) -> None:
        self.cuts: list[Cut] = []
        self._held: dict[str, tuple[int, torch.Tensor]] = {}
        self._columns: tuple[list[Any], ...] = _columns(())
        self._num_read = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._held[name] = self._num_read, tensor
        self._num_read += 1
        for column, value in zip(self._columns, (name, tensor.shape, tensor.dtype), strict=True):
            column.append(value)

    def cut(self, layout: BucketLayout, index: int, *, is_last: bool) -> Batch:
        taken = [self._held.pop(entry.name) for entry in layout.tensors]
        bucket = Bucket.of(layout, is_last=is_last)
        self.cuts.append(
            Cut(
                bucket=bucket,
                stop=self._num_read,
                positions=tuple(position for position, _ in taken),
                columns=self._columns,
            )
        )
        self._columns = _columns(())
        return Batch(index, bucket, [tensor for _, tensor in taken])


def _columns(tensors: Sequence[NamedTensor]) -> tuple[list[Any], ...]:
    """What is compared: a list for each property is quicker than a tuple for each tensor."""
    return (
        [name for name, _ in tensors],
        [tensor.shape for _, tensor in tensors],
        [tensor.dtype for _, tensor in tensors],
    )
