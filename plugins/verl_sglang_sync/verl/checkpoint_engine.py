"""verl's checkpoint engine `sglang_sync`: weight sync to rollouts on GPUs of their own.

verl makes a checkpoint engine in every trainer process and in every rollout worker. In a sync verl
calls `prepare`, `build_topology`, `init_process_group`, `send_weights` / `receive_weights`,
`finalize`. Here the bytes go from the trainer straight into SGLang's TP workers. A rollout worker
only describes its server to the trainer.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from verl_sglang_sync.config import DISAGGREGATED_BACKEND, WeightSyncConfig
from verl_sglang_sync.engine.server_client.client import SGLangServerClient
from verl_sglang_sync.engine.update_groups import Replica
from verl_sglang_sync.http_settings import server_url
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.sources.export import AdapterExport, NamedTensor
from verl_sglang_sync.sync.adapter_sync import AdapterSync, AdapterUpdate
from verl_sglang_sync.sync.topologies import disaggregated_sync
from verl_sglang_sync.sync.weight_sync import WeightSync
from verl_sglang_sync.trainer_ranks import (
    TrainerRanks,
    run_on_all,
)
from verl_sglang_sync.verl.exports import make_exports_repeatable
from verl_sglang_sync.verl.offload import place_offloaded_parameters
from verl_sglang_sync.verl.rollout_server import (
    RolloutServer,
    current_device,
    rollout_of_this_process,
)

NCCL_VARIABLE = "NCCL_CUMEM_ENABLE"


@CheckpointEngineRegistry.register(DISAGGREGATED_BACKEND)
class SGLangSyncCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """The trainer's or the rollout's end of a disaggregated weight sync.

    Args:
        bucket_size: verl's bucket size, in bytes. Ignored.
        is_master: True on the trainer's first rank, False on its other ranks, None in a rollout
            worker.

    Raises:
        ValueError: `checkpoint_engine.engine_kwargs.sglang_sync` is not empty.
    """

    wire_format = DISAGGREGATED_BACKEND

    def __init__(self, bucket_size: int, is_master: bool | None = None, **unknown: Any) -> None:
        if unknown:
            raise ValueError(
                f"checkpoint_engine.engine_kwargs.{DISAGGREGATED_BACKEND}={unknown}: allowed: "
                "nothing. Settings belong under actor_rollout_ref.rollout.custom.weight_sync"
            )
        # `bucket_size` is not kept, because the settings have the same.
        self._is_source = bool(is_master)
        self._is_rollout = is_master is None
        self._servers: list[RolloutServer] = []
        self._weight_sync: WeightSync | None = None
        self._ranks: TrainerRanks | None = None
        self._adapter: AdapterSync | None = None
        self._have_base: frozenset[str] = frozenset()  # replicas with the weights below an adapter
        if not self._is_rollout:
            make_exports_repeatable()

    def prepare(self) -> RolloutServer | None:
        """Describe the server that this rollout worker leads, or return None if it leads none."""
        if not self._is_rollout:
            return None
        return rollout_of_this_process().rollout_server()

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[RolloutServer | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group`: for trainer ranks the replicas' servers."""
        servers = [server for server in metadata[actor_wg_world_size:] if server is not None]
        return (
            {"servers": [servers] * actor_wg_world_size},
            {"servers": [[]] * rollout_world_size},
        )

    def init_process_group(self, servers: list[RolloutServer]) -> None:
        """Keep the servers. The process group is formed, or used again, when weights are sent."""
        self._servers = servers
        if not self._is_rollout and self._servers and self._settings.for_session().routes:
            place_offloaded_parameters(current_device())

    def finalize(self) -> None:
        """Keep the process group and the staging buffers for the next sync."""

    async def send_weights(
        self, weights: Iterable[NamedTensor], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send all weights to all replicas. Every trainer rank must call this.

        Args:
            weights: the export of all weights.
            global_steps: the version of the weights.

        Returns:
            Metrics of the sync on the first rank. Empty on other ranks.

        Raises:
            WeightSyncError: on every rank, if any rank or replica failed.
        """
        weight_sync = self._made_weight_sync()
        servers = await self._find_servers()
        replicas = [replica for _, replica in servers]
        version = None if global_steps is None else str(global_steps)
        report = SyncReport(mode=f"{DISAGGREGATED_BACKEND}/{self._settings.mode}", replica=None)
        with report.stage("sync"):
            adapter = getattr(weights, "adapter", None)
            if adapter is None or not self._all_have_base(replicas):
                self._have_base = frozenset()  # a sync that fails leaves weights half-written
                weights = self._servers[0].format.applied(weights)
                await weight_sync.sync(weights, version=version, report=report, replicas=replicas)
            if adapter is not None:
                self._have_base = _identities(replicas)
                await self._sync_adapter(adapter, replicas, report)
        if not self._is_source:
            return {}
        report.weight_version = version
        report.write(self._settings.report_file)
        if global_steps is not None:
            for actor, _ in servers:  # verl's V1 trainer reads the version back with every sample
                await actor.set_global_steps.remote(global_steps)
        return report.metrics()

    async def _find_servers(self) -> list[tuple[Any, Replica]]:
        """Find the servers of all replicas. Collective.

        Returns:
            The servers' Ray actors and replicas on the first rank. Empty on other ranks.

        Raises:
            WeightSyncError: on all ranks, if a server is gone or silent.
        """
        servers: list[tuple[Any, Replica]] = []
        limit_s = self._settings.request_timeout_s

        async def find() -> None:
            for server in self._servers:
                actor = ray.get_actor(server.actor_name)
                try:
                    async with asyncio.timeout(limit_s):
                        address = await actor.get_server_address.remote()
                except TimeoutError:
                    text = f"server {server.actor_name} did not answer within {limit_s:g} s"
                    raise TimeoutError(text) from None
                url = server_url(*address)
                replica = Replica(
                    identity=actor._actor_id.hex(),  # differs after a restart
                    base_url=url,
                    client=SGLangServerClient(url, **server.access),
                    num_ranks=server.num_ranks,
                )
                servers.append((actor, replica))

        assert self._ranks is not None, "made with the weight sync"
        await run_on_all(self._ranks, "find the servers", find() if self._is_source else None)
        return servers

    def _all_have_base(self, replicas: Sequence[Replica]) -> bool:
        """Return True if all replicas have the base weights of a LoRA adapter. Collective."""
        # Only the first rank has the list of replicas.
        assert self._ranks is not None, "made with the weight sync"
        return self._ranks.all(self._have_base >= _identities(replicas))

    async def _sync_adapter(
        self, export: AdapterExport, replicas: Sequence[Replica], report: SyncReport
    ) -> None:
        """Make all replicas serve this LoRA adapter. All replicas have the base weights already."""
        from verl_sglang_sync.verl.adapter import collect_adapter

        engines = {replica.identity: replica.client for replica in replicas}
        num_ranks, is_leader = self._servers[0].num_ranks, self._is_source
        assert self._adapter is not None, "made with the weight sync"

        def collect() -> AdapterUpdate:
            return collect_adapter(*export(), num_ranks=num_ranks, is_leader=is_leader)

        await self._adapter.sync(collect, engines, report)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[NamedTensor, None]:
        """Yield nothing."""
        # The engine's processes have received the weights themselves.
        nothing: tuple[NamedTensor, ...] = ()
        for item in nothing:
            yield item

    @property
    def _settings(self) -> WeightSyncConfig:
        if not self._servers:
            raise ValueError("no rollout replica takes part in the weight sync")
        return self._servers[0].settings

    def _made_weight_sync(self) -> WeightSync:
        if self._weight_sync is None:
            device, settings = current_device(), self._settings
            _check_nccl(device)
            address = ray.util.get_node_ip_address().strip("[]") if self._is_source else None
            ranks = self._ranks = TrainerRanks(timeout_s=settings.request_timeout_s)
            self._adapter = AdapterSync(ranks)
            self._weight_sync = disaggregated_sync(
                address=address, settings=settings, ranks=ranks, device=device
            )
        return self._weight_sync


def _check_nccl(device: torch.device) -> None:
    """Raise ValueError if the trainer's `NCCL_CUMEM_ENABLE` is not that of SGLang's processes."""
    # verl sets the variable to 0 in SGLang's processes. Between processes with different values
    # NCCL fails, with an unhandled CUDA error. NCCL reads the variable once, so it must be set
    # before the process starts.
    value = os.environ.get(NCCL_VARIABLE)
    if device.type == "cuda" and value != "0":
        raise ValueError(
            f"{NCCL_VARIABLE}={value!r} in the trainer's processes: allowed: '0', as in SGLang's. "
            f"Set ray_kwargs.ray_init.runtime_env.env_vars.{NCCL_VARIABLE}='0' as "
            "+weight_sync=disaggregated does, or the variable where a running Ray cluster starts"
        )


def _identities(replicas: Iterable[Replica]) -> frozenset[str]:
    return frozenset(replica.identity for replica in replicas)
