"""verl's rollout class for `("sglang", "async")`, of which every trainer worker has one.

With a `+weight_sync` preset the rollout calls the sharding manager for all stages. Without a preset
the rollout does what verl's own `ServerAdapter` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

from verl_sglang_sync.config import DISAGGREGATED_BACKEND, WeightSyncConfig
from verl_sglang_sync.engine.server_client.client import SGLangServerClient
from verl_sglang_sync.http_settings import server_url
from verl_sglang_sync.report import warn_once
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.stages import KV_CACHE
from verl_sglang_sync.sync.sharding_manager import SGLangShardingManager
from verl_sglang_sync.trainer_ranks import TrainerRanks
from verl_sglang_sync.verl.adapter import collect_adapter
from verl_sglang_sync.verl.engine_format import EngineFormat
from verl_sglang_sync.verl.exports import make_exports_repeatable
from verl_sglang_sync.verl.offload import place_offloaded_parameters
from verl_sglang_sync.verl.rollout_server import RolloutServer, current_device, register_rollout
from verl_sglang_sync.verl.upstream import complete_server_client, waits_before_kv_cache

LORA_SLEEP_LEVEL = 1  # verl's level at which the weights stay, because a LoRA adapter is served


class WeightSyncRollout(ServerAdapter):  # type: ignore[misc]
    """verl's `ServerAdapter` with our stages and wire formats, made with the same arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = WeightSyncConfig.from_rollout(self.config)
        self._manager: SGLangShardingManager | None = None
        if self._settings is not None:
            make_exports_repeatable()
            if self._settings.for_session().routes:
                place_offloaded_parameters(current_device())
            complete_server_client()
        register_rollout(self)

    def rollout_server(self) -> RolloutServer | None:
        """Describe the server that this rollout worker leads, or return None if it leads none.

        Raises:
            ValueError: the recipe has no preset.
        """
        if self._settings is None:
            raise ValueError(
                "checkpoint_engine.backend=sglang_sync needs a preset: +weight_sync=disaggregated"
            )
        if self.rollout_rank != 0:
            return None
        return RolloutServer(
            actor_name=f"sglang_server_{self.replica_rank}_0",
            num_ranks=self.config.tensor_model_parallel_size * self.config.data_parallel_size,
            settings=self._settings,
            format=self._format,
            access=self._access(self._settings),
        )

    async def resume(self, tags: list[str]) -> None:
        """Resume memory of the engine. verl calls this before and after a sync."""
        if self._settings is None:
            await super().resume(tags)
            return
        if KV_CACHE in tags and not waits_before_kv_cache():
            await asyncio.to_thread(torch.distributed.barrier)
        manager = await self._sharding_manager()
        await self._account_for_sleep(manager)
        await manager.resume(tags)
        await self._keep_metrics(manager)

    async def release(self) -> None:
        """Release the engine's memory. verl 0.9.1 has the server's actor sleep instead."""
        if self._settings is None:
            await super().release()
            return
        manager = await self._sharding_manager()
        await manager.release((KV_CACHE,) if self.sleep_level == LORA_SLEEP_LEVEL else None)

    async def update_weights(
        self,
        weights: Any,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Send `weights` to the engine. Every trainer rank must call this.

        Args:
            weights: the export of all weights, or of a LoRA adapter.
            global_steps: the version of the weights.
            wire_format: the format of verl's checkpoint engine.
        """
        if wire_format == DISAGGREGATED_BACKEND:
            async for _ in weights:  # the trainer has sent the weights straight to the engine
                raise AssertionError("a disaggregated sync yields no tensors")
            return
        # Other wire formats are deltas, which are not full weights.
        if (
            self._settings is None
            or wire_format != "named_tensors"
            or self._comes_from_other_backend(weights)
        ):
            await super().update_weights(weights, global_steps, wire_format, **kwargs)
            return
        manager = await self._sharding_manager()
        version = None if global_steps is None else str(global_steps)
        # verl syncs the base weights of an adapter first, and the adapter alone from then on.
        if (peft_config := kwargs.get("peft_config")) and kwargs.get("base_sync_done"):
            collect = partial(
                collect_adapter,
                weights,
                peft_config,
                num_ranks=self.device_mesh["infer_tp"].size(),
                is_leader=self._engine is not None,
            )
            await manager.sync_adapter(collect, version=version, base=self._base_below(weights))
        else:
            # `applied` only wraps the export. A sync by the route iterates nothing, and reads the
            # `sources` of the export.
            await manager.sync(self._format.applied(weights), version=version)
        if self._engine is not None and global_steps is not None:
            # verl's V1 trainer reads the version back with every sample.
            await self.server_actor.set_global_steps.remote(global_steps)
        await self._keep_metrics(manager)

    def _base_below(self, weights: Any) -> Callable[[], Iterable[NamedTensor]] | None:
        """Return a function that makes the export of the weights below an adapter, or None."""
        base = getattr(weights, "base", None)
        return None if base is None else lambda: self._format.applied(base())

    def _comes_from_other_backend(self, weights: Any) -> bool:
        """Return True, with a warning, if another checkpoint engine delivers tensor by tensor."""
        if not hasattr(weights, "__aiter__"):
            return False
        warn_once(
            f"checkpoint_engine.backend={self.config.checkpoint_engine.backend!r} delivers the "
            "weights tensor by tensor: verl's own update is used, which is slower. Use "
            f"backend={DISAGGREGATED_BACKEND!r} with +weight_sync=disaggregated to send them "
            "straight to the engine"
        )
        return True

    @property
    def _format(self) -> EngineFormat:
        return EngineFormat.of_rollout(self.config, self.model_config.hf_config)

    async def _account_for_sleep(self, manager: SGLangShardingManager) -> None:
        """Add the costs of the last sleep to the report."""
        # verl calls the server's actor to sleep, so only the actor has the costs.
        if self._engine is not None and "release" not in manager.report.seconds:
            sleep = await self.server_actor.take_sleep_costs.remote()
            if sleep is not None:
                manager.report.seconds["release"], costs = sleep
                manager.report.add_costs("release", costs)

    async def _keep_metrics(self, manager: SGLangShardingManager) -> None:
        """Send the metrics of a written report to the server (`step_metrics` collects them)."""
        if (report := manager.take_written()) is not None:
            await self.server_actor.keep_metrics.remote(report.metrics())

    async def _sharding_manager(self) -> SGLangShardingManager:
        await self._init_server_adapter()
        if self._manager is None:
            assert self._settings is not None
            self._manager = SGLangShardingManager(
                engine=self._client(self._settings),
                settings=self._settings,
                ranks=TrainerRanks(
                    timeout_s=self._settings.request_timeout_s, tp_mesh=self.device_mesh["infer_tp"]
                ),
                device=current_device(),
                replica=self.replica_rank,
            )
        return self._manager

    def _client(self, settings: WeightSyncConfig) -> SGLangServerClient | None:
        if self._engine is None:  # only the replica's leader has verl's client of the server
            return None
        server = self._engine.server_args
        return SGLangServerClient(
            server_url(server.host, server.port),
            **self._access(settings),
            rank=torch.distributed.get_rank(),
            replica=self.replica_rank,
        )

    def _access(self, settings: WeightSyncConfig) -> dict[str, Any]:
        """Return the time limits and API keys of the server's client (`RolloutServer.access`)."""
        kwargs = (self.config.get("engine_kwargs", None) or {}).get("sglang", None) or {}
        keys = {key: kwargs.get(key) for key in ("api_key", "admin_api_key")}
        limits = {"timeout_s": settings.request_timeout_s, "timeouts_s": settings.timeouts_s}
        return keys | limits
