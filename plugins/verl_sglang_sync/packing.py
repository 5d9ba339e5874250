"""Turns the trainer's export into ready-to-send buckets, one mode each.

A packer is fed the exported tensors one by one and yields a `Parcel` per bucket. It holds at most
one bucket at a time, plus the members of fusion groups that are not whole yet.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_loader import manifest as wire
from sglang_loader.bucket_loader import FLATTENED_LOADER, NAMED_LOADER
from verl_sglang_sync.planner import BucketPlan, BucketPlanner
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.staging import StagingBuffer, spec_of

NamedTensor = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class Parcel:
    """One bucket, ready to be shared with the engine.

    Attributes:
        plan: what the bucket holds.
        named_tensors: what the engine's loader receives.
        load_format: the engine's loader.
    """

    plan: BucketPlan
    named_tensors: list[NamedTensor]
    load_format: str


class Packer(Protocol):
    """Packs one sync; use a new packer for every sync."""

    def parcels(self, weights: Iterable[NamedTensor]) -> Iterator[Parcel]:
        """Yield the buckets of `weights` in order.

        A parcel's tensors are valid until the next one is asked for.
        """


class _Planned:
    """The part all packers share: which tensors make up the next bucket.

    A tensor is held until its bucket is closed. The planner closes a bucket only when the first
    tensor of the next one is known, so that one is held too.

    Args:
        bucket_bytes: limit of a bucket, in bytes.
        report: gets the counts and the seconds of "export".
        compact: clone views into bigger storages while they are held.
    """

    def __init__(self, bucket_bytes: int, report: SyncReport, *, compact: bool) -> None:
        self._planner = BucketPlanner(bucket_bytes=bucket_bytes)
        self._held: dict[str, torch.Tensor] = {}
        self._report = report
        self._compact = compact

    def buckets(
        self, weights: Iterable[NamedTensor]
    ) -> Iterator[tuple[BucketPlan, list[NamedTensor]]]:
        source = iter(weights)
        failure: Exception | None = None
        while True:
            with self._report.stage("export"):
                item = next(source, None)
            if item is None:
                break
            name, tensor = item
            closed = self._planner.add(spec_of(name, tensor))
            if failure is None:
                try:
                    self._held[name] = _compact(tensor) if self._compact else tensor
                except Exception as error:
                    # Raised where the bucket ends: up to there the other ranks go on exporting,
                    # and the export's collectives need this one.
                    failure = error
                    self._held.clear()
            del item, tensor
            if failure is not None and closed:
                raise failure
            yield from map(self._release, closed)
        if failure is not None:
            raise failure
        yield from map(self._release, self._planner.finish())

    def _release(self, plan: BucketPlan) -> tuple[BucketPlan, list[NamedTensor]]:
        self._report.num_buckets += 1
        self._report.num_tensors += len(plan.slots)
        self._report.payload_bytes += plan.payload_bytes
        self._report.sent_bytes += plan.payload_bytes
        return plan, [(slot.spec.name, self._held.pop(slot.spec.name)) for slot in plan.slots]


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that keeps no more memory alive than its own bytes.

    A view into a bigger storage (one expert of a fused tensor, say) would pin all of it, and its
    IPC handle would share all of it; a tensor that fills its storage is kept as it is.
    """
    if tensor.untyped_storage().nbytes() > tensor.nbytes:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensor


class NamedTensorPacker:
    """`mode=bucketed`: a bucket is a list of named tensors, each with a handle of its own.

    Args:
        device: the engine's device; tensors that live elsewhere are moved there.
        bucket_bytes: limit of a bucket, in bytes.
        report: gets the counts and the seconds of "export" and "pack".
    """

    def __init__(self, *, device: torch.device, bucket_bytes: int, report: SyncReport) -> None:
        self._device = device
        self._planned = _Planned(bucket_bytes, report, compact=True)
        self._report = report

    def parcels(self, weights: Iterable[NamedTensor]) -> Iterator[Parcel]:
        """See `Packer`."""
        for plan, tensors in self._planned.buckets(weights):
            with self._report.stage("pack"):
                placed = [(name, tensor.detach().to(self._device)) for name, tensor in tensors]
                tensors.clear()
            yield Parcel(plan, placed, NAMED_LOADER)
            del placed  # before the next bucket is exported


class FlattenedPacker:
    """`mode=flattened`: a bucket is one staging buffer and a manifest.

    The buffer is reused for every bucket of the sync and dropped with the packer, so that between
    syncs the GPU memory is free for the engine's KV cache.

    Args:
        device: the engine's device.
        bucket_bytes: limit of a bucket, in bytes.
        report: gets the counts and the seconds of "export" and "pack".
    """

    def __init__(self, *, device: torch.device, bucket_bytes: int, report: SyncReport) -> None:
        self._staging = StagingBuffer(device)
        # Packing copies the bytes anyway; the views of one fused tensor share a bucket or two.
        self._planned = _Planned(bucket_bytes, report, compact=False)
        self._report = report
        self._sync_id = uuid.uuid4().hex

    def parcels(self, weights: Iterable[NamedTensor]) -> Iterator[Parcel]:
        """See `Packer`."""
        num_tensors = 0
        for plan, tensors in self._planned.buckets(weights):
            num_tensors += len(plan.slots)
            with self._report.stage("pack"):
                self._staging.reserve(plan.nbytes)
                for slot, (_, tensor) in zip(plan.slots, tensors, strict=True):
                    self._staging.put(slot, tensor)
                    del tensor
                tensors.clear()
                flat = self._staging.filled(plan.nbytes)
            self._report.staging_bytes = max(self._report.staging_bytes, self._staging.nbytes)
            text = wire.encode(manifest_of(plan, sync_id=self._sync_id, num_tensors=num_tensors))
            yield Parcel(plan, [(text, flat)], FLATTENED_LOADER)


def manifest_of(plan: BucketPlan, *, sync_id: str, num_tensors: int) -> wire.BucketManifest:
    """Describe a planned bucket to the engine; `num_tensors` counts the sync up to this bucket."""
    return wire.BucketManifest(
        version=wire.WIRE_VERSION,
        sync_id=sync_id,
        index=plan.index,
        last=plan.last,
        num_tensors=num_tensors,
        nbytes=plan.nbytes,
        tensors=tuple(
            wire.TensorEntry(s.spec.name, s.spec.dtype, s.spec.shape, s.offset, s.spec.nbytes)
            for s in plan.slots
        ),
    )
