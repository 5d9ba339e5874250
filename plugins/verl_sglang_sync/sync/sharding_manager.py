"""The sharding manager: runs the stages in which an engine wakes up, is synced, and sleeps.

manager = SGLangShardingManager(engine=client, settings=cfg, ranks=ranks, device=gpu)
await manager.resume(["weights"])
await manager.sync(weights)
# verl's worker frees its own memory, and waits for the other ranks
await manager.resume(["kv_cache"])
...
await manager.release()
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from verl.utils.ulysses import BaseShardingManager

from sglang_loader.common.replies import stage_costs_in
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.engine_ranks import EngineServer
from verl_sglang_sync.engine.server_client import operations
from verl_sglang_sync.engine.server_client.operations import Call
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.stages import KV_CACHE, WEIGHTS
from verl_sglang_sync.sync.adapter_sync import AdapterSync, AdapterUpdate
from verl_sglang_sync.sync.topologies import colocated_sync
from verl_sglang_sync.trainer_ranks import TrainerRanks, WeightSyncError, run_on_all

logger = logging.getLogger(__name__)


class BaseLost(RuntimeError):
    """An engine without the weights below its adapter."""


class SGLangShardingManager(BaseShardingManager):  # type: ignore[misc]
    """The wake-ups, syncs and sleeps of the engine of one rollout replica.

    Every trainer process has one manager. The replica's leader calls the engine. The other ranks
    take part in the collectives.

    Args:
        engine: the replica's server on its leader. None on the other ranks.
        device: device of the engine's weights on this rank.

    Attributes:
        report: of the wake-up in progress. A written report is replaced by a new one.
    """

    def __init__(
        self,
        *,
        engine: EngineServer | None,
        settings: WeightSyncConfig,
        ranks: TrainerRanks,
        device: torch.device,
        replica: int = 0,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._settings = settings
        self._ranks = ranks
        self._weight_sync = colocated_sync(
            engine=engine, settings=settings.for_session(), ranks=ranks, device=device
        )
        self._replica = replica
        self.report = self._new_report()
        self._written: SyncReport | None = None
        self._adapter = AdapterSync(ranks)
        self._base_version: str | None = None  # published by the last sync that was no adapter's

    def take_written(self) -> SyncReport | None:
        """Return the report that was written since the last call, or None.

        On other ranks than the leader there is none.
        """
        written, self._written = self._written, None
        return written

    async def resume(self, tags: Sequence[str]) -> None:
        """Resume the memory of verl's stages "weights" and "kv_cache".

        They stand for all tags before and after the sync, see `stages`.
        """
        if not self._settings.free_cache_engine:
            return
        order = self._settings.stages
        # In a one-stage wake-up "weights" resumes everything. The later "kv_cache" changes nothing
        # in the engine.
        one_stage = WEIGHTS in tags and not self._settings.multi_stage_wake_up
        wanted = (
            *(order.before_sync if WEIGHTS in tags else ()),
            *(order.after_sync if KV_CACHE in tags or one_stage else ()),
        )
        name = "resume_" + "_and_".join(
            tag for tag in (WEIGHTS, KV_CACHE) if tag in tags or one_stage
        )
        await self._on_leader(name, operations.resume_memory(wanted))
        # verl resumes the KV cache last, so that the report of this wake-up is complete.
        if KV_CACHE in tags:
            self._write()

    async def release(self, tags: Sequence[str] | None = None) -> None:
        """Release the memory of tags that is not released yet, by default of all tags."""
        if not self._settings.free_cache_engine:
            return
        wanted = self._settings.stages.sleep if tags is None else tags
        await self._on_leader("release", operations.release_memory(wanted))

    async def sync(self, weights: Iterable[NamedTensor], *, version: str | None = None) -> None:
        """Send all weights. The engine drops its prefix cache, and publishes the version.

        Args:
            weights: pairs `(name, full tensor)`. Iterating is collective over the trainer's ranks,
                and goes on to the end even if the sync fails. See `sources.export`.
            version: version of the new weights, such as verl's global step.

        Raises:
            WeightSyncError: on every rank, if any rank failed. The engine must not serve.
        """
        await self._reported(
            self._weight_sync.sync(weights, version=version, report=self.report), version
        )
        self._base_version = version

    async def sync_adapter(
        self,
        collect: Callable[[], AdapterUpdate],
        *,
        version: str | None = None,
        base: Callable[[], Iterable[NamedTensor]] | None = None,
    ) -> None:
        """Replace the engine's LoRA adapter, see `AdapterSync.sync`.

        Args:
            base: makes the export of the weights below the adapter, for engines that have lost
                them. Collective over the trainer's ranks.

        Raises:
            WeightSyncError: on every rank, also if an engine has lost the weights, and `base` is
                None.
        """
        if not await self._all_have_base(can_sync=base is not None):
            assert base is not None, "else all ranks have failed"
            await self.sync(base(), version=version)
        engines = {} if self._engine is None else {"its own": self._engine}
        await self._reported(self._adapter.sync(collect, engines, self.report), version)

    async def _all_have_base(self, *, can_sync: bool) -> bool:
        """Return False if an engine publishes another version than the last sync. Collective.

        An engine that was replaced publishes the version that it was started with. Of a sync
        without a version nothing is known.
        """
        engine, base = self._engine, self._base_version
        has_base = True

        async def ask(engine: EngineServer) -> None:
            nonlocal has_base
            self._weight_sync.check_reply(self.report)  # after which the version is published
            info = await asyncio.wrap_future(engine.submit(operations.model_info()))
            found = info["weight_version"]
            if has_base := found == base:
                return
            text = (
                f"the engine publishes weight version {found!r}, and the weights below the LoRA "
                f"adapter were synced as {base!r}: it was replaced, or has had other weights since"
            )
            if not can_sync:
                raise BaseLost(f"{text}. Sync these weights before the adapter")
            logger.warning("weight sync: %s. They are synced again before the adapter", text)

        if base is None:  # on all ranks
            return True
        with self._new_report_after_failure():
            await run_on_all(self._ranks, "model_info", None if engine is None else ask(engine))
            return self._ranks.all(has_base)

    async def _reported(self, sync: Coroutine[Any, Any, None], version: str | None) -> None:
        """Wait for a sync, and count it in the report."""
        with self._new_report_after_failure(), self.report.stage("sync"):
            await sync
        self.report.weight_version = version
        # Without sleep no wake-up follows that would write the report.
        if not self._settings.free_cache_engine:
            self._write()

    async def _on_leader(self, stage: str, call: Call) -> None:
        """Run an operation on the engine of each replica. All ranks raise if one fails."""
        engine = self._engine
        work = None if engine is None else self._run_stage(stage, engine, call)
        with self._new_report_after_failure():
            await run_on_all(self._ranks, stage, work)

    async def _run_stage(self, stage: str, engine: EngineServer, call: Call) -> None:
        with self.report.stage(stage):
            reply = await asyncio.wrap_future(engine.submit(call))
        self.report.add_costs(stage, stage_costs_in(reply))
        # The last sync did not wait for its reply, which has come by now.
        self._weight_sync.check_reply(self.report)

    @contextmanager
    def _new_report_after_failure(self) -> Iterator[None]:
        """Replace the report if a stage fails."""
        try:
            yield
        except WeightSyncError:
            # If the caller repeats the stages, they count from zero.
            self.report = self._new_report()
            raise

    def _new_report(self) -> SyncReport:
        return SyncReport(mode=self._settings.mode, replica=self._replica)

    def _write(self) -> None:
        # A wake-up without a sync has nothing to report.
        has_synced = self.report.num_buckets or self.report.weight_version is not None
        if self._engine is not None and has_synced:
            self.report.write(self._settings.report_file)
            self._written = self.report
        self.report = self._new_report()
