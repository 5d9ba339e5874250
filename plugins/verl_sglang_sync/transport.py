"""Ways of one sync's weights from the trainer to the engine; the sharding manager picks one."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from sglang_loader.manifest_verdict import ManifestVerdict
from sglang_loader.update_keys import UpdateKey, UpdateKeys
from verl_sglang_sync.collective import TrainerGroup
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.manifest_gate import Announcement, ManifestGate
from verl_sglang_sync.packing import (
    FlattenedPacker,
    NamedTensor,
    NamedTensorPacker,
    Packer,
    Parcel,
)
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.weight_sync import Export, WeightSyncError, run_sync


class Updater(Protocol):
    """The engine's update request; `SGLangServerClient` has it."""

    async def update_weights(
        self,
        handles: Sequence[bytes],
        *,
        load_format: str,
        flush_cache: bool,
        weight_version: str | None,
        key: UpdateKey | None = None,
    ) -> None:
        """Run one of our loaders on every TP rank; optionally drop the prefix cache, publish.

        With a key the engine applies it once, however often it arrives.
        """

    def start_update(
        self,
        handles: Sequence[bytes],
        *,
        load_format: str,
        flush_cache: bool,
        weight_version: str | None,
        key: UpdateKey | None = None,
        sent: threading.Event | None = None,
    ) -> Future[None]:
        """`update_weights` for a caller that goes on meanwhile, and waits in plain code.

        `sent` is set when the request has left.
        """

    async def check_manifest(self, encoded: bytes) -> list[ManifestVerdict]:
        """Does what a manifest announces fit the engine's model? Loads nothing."""


class SyncTransport(Protocol):
    """Carries syncs of one replica; lives in every trainer process, for all its syncs."""

    async def sync(
        self, weights: Iterable[NamedTensor], *, version: str | None, report: SyncReport
    ) -> None:
        """Send all of `weights`; every trainer rank calls this, all return or all raise.

        Raises:
            WeightSyncError: on every rank, if any rank failed.
        """

    def settle(self, report: SyncReport) -> None:
        """Look at the reply to the last sync's request, where the sync had no need of it.

        To be called after the engine's next stage, when it has long come.

        Args:
            report: gets the seconds, in "reply".

        Raises:
            Exception: the reply is bad, or was lost.
        """


async def check_before(
    gate: ManifestGate,
    weights: Iterable[NamedTensor],
    engine: Updater | None,
    report: SyncReport,
) -> None:
    """Announce the manifest of a sync, unless it is known; all ranks call this.

    Raises:
        WeightSyncError: on every rank, if it does not fit.
    """
    if not gate.must_ask(weights):
        return
    with report.stage("manifest"):
        announcement = gate.announce(weights)
        gate.settle(announcement, *await ask_engine(engine, announcement))


async def ask_engine(
    engine: Updater | None, announcement: Announcement
) -> tuple[list[ManifestVerdict], str | None]:
    """The verdicts of this rank's engine, if it leads one, or the traceback of asking for them."""
    if engine is None or not announcement.specs:
        return [], None
    try:
        return await engine.check_manifest(announcement.encoded), None
    except Exception:
        return [], traceback.format_exc()


class BucketRequests:
    """Modes "bucketed" and "flattened": one request per bucket, all ranks in step.

    Args:
        engine: the replica's server on its leader, None on the other ranks.
        settings: the preset.
        group: the trainer's ranks.
        device: of the engine's weights on this rank.
    """

    def __init__(
        self,
        *,
        engine: Updater | None,
        settings: WeightSyncConfig,
        group: TrainerGroup,
        device: torch.device,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._group = group
        self._device = device
        self._gate = ManifestGate(settings.manifest_check, group.agree)

    async def sync(
        self, weights: Iterable[NamedTensor], *, version: str | None, report: SyncReport
    ) -> None:
        """See `SyncTransport`. The last bucket drops the prefix cache and publishes the version."""
        await check_before(self._gate, weights, self._engine, report)
        in_parts = self._gate.must_check_in_parts(weights, "bucket by bucket")
        export = self._gate.export(weights)
        keys = UpdateKeys()

        async def load(handles: list[bytes], parcel: Parcel) -> None:
            assert self._engine is not None, "only the leader gathers handles"
            if in_parts:
                with report.stage("manifest"):
                    await self._check_bucket(parcel, export)
            await self._engine.update_weights(
                handles,
                load_format=parcel.load_format,
                flush_cache=parcel.plan.last,
                weight_version=version if parcel.plan.last else None,
                key=next(keys),
            )

        try:
            packer = self._packer(report)
            await run_sync(export, packer=packer, group=self._group, load=load, report=report)
        except WeightSyncError:
            self._gate.forget()
            raise
        if in_parts:
            self._gate.accept(Announcement.of(export.specs))
        self._gate.confirm()

    def settle(self, report: SyncReport) -> None:
        """See `SyncTransport`: every reply was waited for."""

    async def _check_bucket(self, parcel: Parcel, export: Export) -> None:
        """Check the bucket that is about to be loaded; with the last one, that none is missing."""
        assert self._engine is not None, "only the leader gathers handles"
        specs = export.specs
        if not parcel.plan.last:
            names = {slot.spec.name for slot in parcel.plan.slots}
            specs = [spec for spec in specs if spec[0] in names]
        announcement = Announcement.of(specs, is_complete=parcel.plan.last)
        verdicts = await self._engine.check_manifest(announcement.encoded)
        problem = self._gate.problem_of(verdicts)
        if problem is not None:
            raise ValueError(problem)

    def _packer(self, report: SyncReport) -> Packer:
        packer = FlattenedPacker if self._settings.mode == "flattened" else NamedTensorPacker
        return packer(device=self._device, bucket_bytes=self._settings.bucket_bytes, report=report)
