"""Ways of one sync's weights from the trainer to the engine; the sharding manager picks one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from sglang_loader.update_keys import UpdateKey, UpdateKeys
from verl_sglang_sync.collective import TrainerGroup
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.packing import (
    FlattenedPacker,
    NamedTensor,
    NamedTensorPacker,
    Packer,
    Parcel,
)
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.weight_sync import run_sync


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
    ) -> Future[None]:
        """`update_weights` for a caller that goes on meanwhile, and waits in plain code."""


class SyncTransport(Protocol):
    """Carries syncs of one replica; lives in every trainer process, for all its syncs."""

    async def sync(
        self, weights: Iterable[NamedTensor], *, version: str | None, report: SyncReport
    ) -> None:
        """Send all of `weights`; every trainer rank calls this, all return or all raise.

        Raises:
            WeightSyncError: on every rank, if any rank failed.
        """


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

    async def sync(
        self, weights: Iterable[NamedTensor], *, version: str | None, report: SyncReport
    ) -> None:
        """See `SyncTransport`. The last bucket drops the prefix cache and publishes the version."""

        keys = UpdateKeys()

        async def load(handles: list[bytes], parcel: Parcel) -> None:
            assert self._engine is not None, "only the leader gathers handles"
            await self._engine.update_weights(
                handles,
                load_format=parcel.load_format,
                flush_cache=parcel.plan.last,
                weight_version=version if parcel.plan.last else None,
                key=next(keys),
            )

        packer = self._packer(report)
        await run_sync(weights, packer=packer, group=self._group, load=load, report=report)

    def _packer(self, report: SyncReport) -> Packer:
        packer = FlattenedPacker if self._settings.mode == "flattened" else NamedTensorPacker
        return packer(device=self._device, bucket_bytes=self._settings.bucket_bytes, report=report)
