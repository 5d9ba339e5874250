"""Reading weights where they are: buckets that are spans of the trainer's own memory.

A trainer whose export yields views of a few large storages on the engine's device needs no packing:
the engine maps those storages and reads each tensor at its own offset. One packed sync is watched;
if its tensors lie that way, and outlive the export, later syncs are cut into spans:

    watch = SourceWatch(device)
    for batch in stream.batches(export, report):
        watch.see(batch)
    cuts = in_place_cuts(stream.cuts, watch.places(), bucket_bytes)   # None: go on packing
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sglang_loader.load_plan import BucketLayout, BucketTensor
from verl_sglang_sync.bucket_stream import Batch, Bucket, Cut
from verl_sglang_sync.planner import ALIGNMENT_BYTES, BucketPlanner

MAX_SPANS_PER_BUCKET = 4
"""More spans than this for each packed bucket cost more in messages than packing does."""


@dataclass(frozen=True)
class Place:
    """Where one exported tensor lay: `offset` bytes into storage number `storage`."""

    storage: int
    offset: int


class SourceWatch:
    """Notes where the tensors of one sync lie.

    Args:
        device: the engine's; memory elsewhere cannot be read in place.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[tuple[int, int], int] = {}
        self._refs: list[StorageWeakRef] = []
        self._places: list[Place] = []
        self._readable = True

    def see(self, batch: Batch) -> None:
        """Note a bucket's tensors, in loading order."""
        for tensor in batch.tensors:
            storage = tensor.untyped_storage()
            base, nbytes = storage.data_ptr(), storage.nbytes()
            if not (_is_mappable(tensor, self._device) and tensor.is_contiguous() and nbytes):
                self._readable = False
                return
            number = self._storages.setdefault((base, nbytes), len(self._refs))
            if number == len(self._refs):
                self._refs.append(StorageWeakRef(storage))
            self._places.append(Place(number, tensor.data_ptr() - base))

    def places(self) -> list[Place] | None:
        """The places of all tensors; None unless all of them outlived the export."""
        if not self._readable or any(ref.expired() for ref in self._refs):
            return None
        return self._places


def in_place_cuts(
    cuts: Sequence[Cut], places: Sequence[Place] | None, bucket_bytes: int
) -> list[Cut] | None:
    """Cut a known stream into spans of storages; pure.

    Args:
        cuts: the stream's packed buckets.
        places: of the tensors, in the order in which those buckets load them.
        bucket_bytes: longest span, in bytes.

    Returns:
        One cut per span, or None where packing is better or needed.
    """
    if places is None or not cuts:
        return None
    tensors = [tensor for cut in cuts for tensor in cut.bucket.layout.tensors]
    spans: list[_Span] = []
    for first, last in _units(tensors):
        if not (spans and spans[-1].extend(first, last, tensors, places, bucket_bytes)):
            spans.append(_Span(places[first]))
            if not spans[-1].extend(first, last, tensors, places, bucket_bytes):
                return None
    if len(spans) > MAX_SPANS_PER_BUCKET * len(cuts):
        return None
    return _cuts_of(spans, cuts, tensors, places)


class _Span:
    """A run of tensors in one storage, and the bytes around them."""

    def __init__(self, place: Place) -> None:
        self.storage = place.storage
        self.start = self.stop = -1
        self.members: list[int] = []

    def extend(
        self,
        first: int,
        last: int,
        tensors: Sequence[BucketTensor],
        places: Sequence[Place],
        limit: int,
    ) -> bool:
        """Take in tensors `[first, last)` if they fit; a single unit may exceed the limit."""
        unit = range(first, last)
        if any(places[i].storage != self.storage for i in unit):
            return False
        start = min(places[i].offset for i in unit) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        stop = max(places[i].offset + tensors[i].nbytes for i in unit)
        if self.members:
            start, stop = min(start, self.start), max(stop, self.stop)
        elif len(unit) == 1:
            limit = max(limit, stop - start)
        if stop - start > limit:
            return False
        self.start, self.stop = start, stop
        self.members += unit
        return True


def _units(tensors: Sequence[BucketTensor]) -> list[tuple[int, int]]:
    """Ranges of tensors that one `load_weights` call must see together."""
    group_of = BucketPlanner(bucket_bytes=1).group_of
    units: list[tuple[int, int]] = []
    previous = None
    for i, tensor in enumerate(tensors):
        group = group_of(tensor.name)
        if group is not None and group == previous:
            units[-1] = (units[-1][0], i + 1)
        else:
            units.append((i, i + 1))
        previous = group
    return units


def _cuts_of(
    spans: Sequence[_Span],
    cuts: Sequence[Cut],
    tensors: Sequence[BucketTensor],
    places: Sequence[Place],
) -> list[Cut]:
    positions = [position for cut in cuts for position in cut.positions]
    names = [name for cut in cuts for name in cut.names]
    shapes = [shape for cut in cuts for shape in cut.shapes]
    dtypes = [dtype for cut in cuts for dtype in cut.dtypes]
    result: list[Cut] = []
    read = 0
    for span in spans:
        taken = tuple(positions[i] for i in span.members)
        stop = max(read, *(position + 1 for position in taken))
        if span is spans[-1]:
            stop = len(names)
        layout = BucketLayout(
            tuple(
                BucketTensor(t.name, t.shape, t.dtype, places[i].offset - span.start)
                for i, t in ((i, tensors[i]) for i in span.members)
            ),
            span.stop - span.start,
        )
        result.append(
            Cut(
                bucket=Bucket.of(layout, is_last=span is spans[-1]),
                stop=stop,
                positions=taken,
                names=names[read:stop],
                shapes=shapes[read:stop],
                dtypes=dtypes[read:stop],
                offsets=[places[i].offset for i in span.members],
                start=span.start,
            )
        )
        read = stop
    return result


def _is_mappable(tensor: torch.Tensor, device: torch.device) -> bool:
    if tensor.device.type != device.type:
        return False
    if device.type == "cpu":
        return bool(tensor.is_shared())
    return device.index in (None, tensor.device.index)
