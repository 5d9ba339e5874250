"""Disaggregated mode: one rank packs the export and broadcasts it to all replicas.

Every trainer rank exports (that is collective); the first one packs buckets into two staging
buffers, broadcasts them, and tells each replica's server what is coming. A bucket's broadcast
begins before the one before it is loaded, and the next bucket is packed meanwhile:

    trainer   pack 0 | pack 1 | pack 2          | pack 3     |
    group                     | send 0 | send 1 | send 2     |
    engines                            | load 0 | load 1     |

A bucket's broadcast begins with the requests that announce it, never earlier: on a GPU it would
wait there for the engines, and whatever of the trainer waits for the whole GPU meanwhile (freeing
memory, its own collectives' set-up) would wait for ever.
"""

from __future__ import annotations

import time
import traceback
import uuid
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from sglang_loader.common.broadcast.broadcast import POLL_S, Broadcast, BroadcastError
from sglang_loader.common.broadcast.messages import (
    BROADCAST_COMPILED,
    BROADCAST_EAGER,
    BroadcastBucket,
    encode_bucket,
)
from sglang_loader.common.check_remarks import LoadCounts, loaded_in
from sglang_loader.common.session.folder import remove_orphans
from verl_sglang_sync.collective import Agreement, WeightSyncError, export_signature
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.server_client import operations
from verl_sglang_sync.engine.update_groups import Replica, UpdateGroup, UpdateGroups
from verl_sglang_sync.report import SyncReport, log_remarks
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.sources.bucket_stream import Batch, Bucket, BucketStream
from verl_sglang_sync.sources.export import Export, NamedTensor

NUM_BUFFERS = 2


class BroadcastTransport:
    """Sends syncs to the replicas; lives in every trainer process, for all its syncs.

    Args:
        groups: on the rank that broadcasts; None on the others.
        settings: the preset.
        agree: `TrainerGroup.agree`, over the trainer's ranks.
        device: of the staging buffers and of the group.
    """

    def __init__(
        self,
        *,
        groups: UpdateGroups | None,
        settings: WeightSyncConfig,
        agree: Callable[..., Agreement],
        device: torch.device,
    ) -> None:
        remove_orphans()  # as a session's trainer does when it makes a folder of its own
        self._groups = groups
        self._settings = settings
        self._agree = agree
        self._device = device
        self._stream = BucketStream(settings.bucket_bytes)
        self._ring = StagingRing(
            device, num_buffers=NUM_BUFFERS, bucket_bytes=settings.bucket_bytes
        )

    def sync(
        self,
        weights: Iterable[NamedTensor],
        replicas: Sequence[Replica],
        *,
        version: str | None,
        report: SyncReport,
    ) -> None:
        """Send all of `weights` to all `replicas`; every trainer rank calls this.

        Raises:
            WeightSyncError: on every rank, if any rank failed; the message has rank and traceback.
        """
        source, exported = Export(weights), _Exported()
        sync: _BroadcastSync | None = None
        failure = None
        try:
            if self._groups is not None:
                group = self._groups.with_replicas(replicas)
                sync = _BroadcastSync(group, self._settings, version, report)
                self._send(source, sync, report, exported)
            else:
                for name, tensor in source:
                    exported.add(_sum_of(name, 0 if tensor.is_meta else tensor.nbytes))
        except Exception:
            failure = traceback.format_exc()
        source.drain()
        result = self._agree(failure, signature=exported.signature)
        if not result.failures and result.other_exports is not None:
            result = Agreement((result.other_exports,))
        if sync is not None and not result.failures:  # the last bucket publishes
            try:
                sync.finish()
            except Exception:
                failure = traceback.format_exc()
        if not result.failures:
            result = self._agree(failure)
        if result.failures:
            if self._groups is not None:
                self._groups.abandon()
            reasons = "\n".join(result.failures)
            raise WeightSyncError(
                f"weight sync failed; the engines' weights are incomplete\n{reasons}"
            )

    def _send(
        self, source: Export, sync: _BroadcastSync, report: SyncReport, exported: _Exported
    ) -> None:
        """Send all buckets, and have all but the last one loaded."""
        self._ring.prepare([bucket.layout.nbytes for bucket in self._stream.buckets])
        for batch in self._stream.batches(source, report):
            for tensor in batch.bucket.layout.tensors:
                exported.add(_sum_of(tensor.name, tensor.nbytes))
            sync.make_room(batch.index)
            with report.stage("pack"):
                storage = self._ring.pack(batch)
            report.staging_bytes = max(report.staging_bytes, self._ring.nbytes)
            flat = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            sync.send(batch, flat[: batch.bucket.layout.nbytes])
            del batch


class _Exported:
    """Counts what a rank exported, in any order."""

    def __init__(self) -> None:
        self._num_tensors = self._checksum = 0

    def add(self, checksum: int) -> None:
        self._num_tensors += 1
        self._checksum = (self._checksum + checksum) & 0xFFFFFFFF

    @property
    def signature(self) -> int:
        return export_signature(self._num_tensors, self._checksum)


@lru_cache(maxsize=1 << 18)
def _sum_of(name: str, nbytes: int) -> int:
    """Of a tensor's name and size; the same every sync."""
    return zlib.crc32(f"{name} {nbytes}".encode())


@dataclass(frozen=True)
class _Packed:
    """A bucket that lies in its staging buffer; `num_tensors` counts from the sync's first."""

    index: int
    bucket: Bucket
    num_tensors: int
    flat: torch.Tensor


class _BroadcastSync:
    """The buckets of one sync, in flight."""

    def __init__(
        self,
        group: UpdateGroup,
        settings: WeightSyncConfig,
        version: str | None,
        report: SyncReport,
    ) -> None:
        self._group = group
        self._settings = settings
        self._version = version
        self._report = report
        self._id = uuid.uuid4().hex
        self._broadcasts: list[Broadcast] = []
        self._requests: list[Future[Any]] = []
        self._waiting: _Packed | None = None
        self._num_tensors = 0

    def make_room(self, index: int) -> None:
        """Wait until the staging buffer of bucket `index` has been sent."""
        if index >= NUM_BUFFERS:
            with self._report.stage("send"):
                self._wait_for(self._broadcasts[index - NUM_BUFFERS], index - NUM_BUFFERS)

    def send(self, batch: Batch, flat: torch.Tensor) -> None:
        """Have the bucket before this one loaded, and begin this one's broadcast."""
        self._num_tensors += len(batch.tensors)
        self._report.sent_bytes += batch.bucket.payload_bytes
        before = self._waiting
        self._waiting = _Packed(batch.index, batch.bucket, self._num_tensors, flat)
        if before is not None:
            self._post(before, following=self._waiting)

    def finish(self) -> None:
        """Have the last bucket loaded, the prefix caches dropped and the version published."""
        if self._waiting is None:
            raise ValueError("the trainer exported no tensor")
        self._post(self._waiting, following=None)
        self._wait_for_requests()

    def _post(self, packed: _Packed, *, following: _Packed | None) -> None:
        """Tell the servers of a bucket and of the one that follows; begin the new broadcasts."""
        self._wait_for_requests()
        last = following is None
        text = encode_bucket(
            BroadcastBucket(
                sync_id=self._id,
                index=packed.index,
                is_last=last,
                num_tensors=packed.num_tensors,
                encoded_layout=packed.bucket.encoded,
                next_nbytes=following.flat.numel() if following is not None else 0,
                timeout_s=self._settings.request_timeout_s,
                manifest_check=self._settings.manifest_check if last else "off",
                recheck_every_n_syncs=self._settings.recheck_every_n_syncs,
            ),
            self._group.secret,
        )
        compiled = self._settings.mode == "compiled"
        for begun in (packed if packed.index == 0 else None, following):
            if begun is not None:
                self._broadcasts.append(Broadcast(begun.flat, self._group.process_group))
        self._requests = [
            client.submit(
                operations.update_from_distributed(
                    [text],
                    ["uint8"],
                    [[packed.flat.numel()]],
                    group_name=self._group.name,
                    load_format=BROADCAST_COMPILED if compiled else BROADCAST_EAGER,
                    flush_cache=last,
                    weight_version=self._version if last else None,
                )
            )
            for _, client in self._group.members
        ]

    def _wait_for_requests(self) -> None:
        """Wait until all replicas have loaded what they were told of."""
        with self._report.stage("load"):
            for request in self._requests:
                reply = request.result()
                log_remarks(reply)
                self._count_loaded(loaded_in(str(reply.get("message"))))
        self._requests = []

    def _count_loaded(self, loaded: list[LoadCounts]) -> None:
        """Count as the engine did that replayed least; in "compiled", which is to replay all."""
        for counts in loaded if self._settings.uses_plan else ():
            if counts.num_eager >= self._report.num_eager:
                self._report.num_replayed = counts.num_replayed
                self._report.num_eager, self._report.eager_reason = counts.num_eager, counts.reason

    def _wait_for(self, broadcast: Broadcast, index: int) -> None:
        """Wait for a broadcast, unless a replica fails meanwhile: then it would never end."""
        deadline = time.monotonic() + self._settings.request_timeout_s
        while not broadcast.is_done():
            for request in self._requests:
                if request.done():
                    request.result()
            if time.monotonic() > deadline:
                raise BroadcastError(
                    f"bucket {index} was not received within {self._settings.request_timeout_s:g} s"
                )
            time.sleep(POLL_S)
