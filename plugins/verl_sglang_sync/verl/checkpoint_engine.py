"""verl's checkpoint engine `sglang_sync`: weight sync to rollouts on GPUs of their own.

verl has one of these in every trainer process and in every rollout worker. Around a sync it calls
`prepare`, `build_topology`, `init_process_group`, `send_weights` / `receive_weights`, `finalize`.
Here the bytes go from the trainer straight into SGLang's TP workers; a rollout worker only tells
the trainer which server is its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from verl_sglang_sync.collective import (
    TorchTrainerGroup,
    TrainerGroup,
    WeightSyncError,
    holds_everywhere,
    run_in_step,
)
from verl_sglang_sync.config import BROADCAST_BACKEND, WeightSyncConfig
from verl_sglang_sync.engine.server_client import SGLangServerClient
from verl_sglang_sync.engine.server_client.operations import server_url
from verl_sglang_sync.engine.update_groups import Replica, UpdateGroups
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.sources.export import AdapterExport, NamedTensor
from verl_sglang_sync.sync.adapter_sync import AdapterSync
from verl_sglang_sync.sync.transport import SessionTransport, disaggregated_transport
from verl_sglang_sync.verl.engine_format import EngineFormat
from verl_sglang_sync.verl.exports import make_exports_repeatable

WIRE_FORMAT = "sglang_sync"
NCCL_VARIABLE = "NCCL_CUMEM_ENABLE"


@dataclass(frozen=True, kw_only=True)
class RolloutServer:
    """What a replica's first rollout worker tells the trainer.

    Attributes:
        actor_name: of the Ray actor around the replica's server.
        num_ranks: tensor-parallel ranks of the engine.
        format: in which the engine expects the weights.
        access: arguments of the server's client (`SGLangServerClient`): limits and keys.
    """

    actor_name: str
    num_ranks: int
    settings: WeightSyncConfig
    format: EngineFormat
    access: Mapping[str, Any]


@CheckpointEngineRegistry.register(BROADCAST_BACKEND)
class SGLangSyncCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Trainer or rollout end of disaggregated weight sync.

    Args:
        bucket_size: verl's bucket size, in bytes; the preset has it too.
        is_master: True on the trainer's first rank, False on its others; None in a rollout worker.

    Raises:
        ValueError: `checkpoint_engine.engine_kwargs.sglang_sync` holds anything.
    """

    wire_format = WIRE_FORMAT

    def __init__(self, bucket_size: int, is_master: bool | None = None, **unknown: Any) -> None:
        if unknown:
            raise ValueError(
                f"checkpoint_engine.engine_kwargs.{BROADCAST_BACKEND}={unknown}: allowed: nothing; "
                "settings belong under actor_rollout_ref.rollout.custom.weight_sync"
            )
        self._is_source = bool(is_master)
        self._is_rollout = is_master is None
        self._servers: list[RolloutServer] = []
        self._transport: SessionTransport | None = None
        self._group: TrainerGroup | None = None
        self._adapter: AdapterSync | None = None
        self._have_base: frozenset[str] = frozenset()  # replicas with the weights below an adapter
        if not self._is_rollout:
            make_exports_repeatable()

    def prepare(self) -> RolloutServer | None:
        """Tell which server this process leads; None in trainers and on other ranks."""
        if not self._is_rollout:
            return None
        from verl_sglang_sync.verl.rollout import rollout_of_this_process

        return rollout_of_this_process().rollout_server()

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[RolloutServer | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Hand the replicas' servers to every trainer rank."""
        servers = [server for server in metadata[actor_wg_world_size:] if server is not None]
        return (
            {"servers": [servers] * actor_wg_world_size},
            {"servers": [[]] * rollout_world_size},
        )

    def init_process_group(self, servers: list[RolloutServer]) -> None:
        """Remember the servers; the group itself is formed, or reused, when weights are sent."""
        self._servers = servers

    def finalize(self) -> None:
        """Nothing to do: group and staging buffers serve the next sync."""

    async def send_weights(
        self, weights: Iterable[NamedTensor], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send all weights to all replicas; every trainer rank calls this.

        Args:
            global_steps: becomes the version of the weights.

        Returns:
            Seconds and bytes of the sync, as metrics of the step; empty on all ranks but the first.

        Raises:
            WeightSyncError: on every rank, if any rank or replica failed.
        """
        transport = self._session_transport()
        servers = await self._find_servers()
        replicas = [replica for _, replica in servers]
        version = None if global_steps is None else str(global_steps)
        report = SyncReport(mode=f"{WIRE_FORMAT}/{self._settings.mode}", replica=None)
        with report.stage("sync"):
            adapter = getattr(weights, "adapter", None)
            if adapter is None or not self._all_have_base(replicas):
                self._have_base = frozenset()  # one that fails leaves them half-written
                weights = self._servers[0].format.applied(weights)
                await transport.sync(weights, version=version, report=report, replicas=replicas)
            if adapter is not None:
                self._have_base = _identities(replicas)
                await self._sync_adapter(adapter, replicas, report)
        if not self._is_source:
            return {}
        report.weight_version = version
        report.publish(self._settings.report_file)
        if global_steps is not None:
            for actor, _ in servers:  # the V1 trainer reads it back with every sample
                await actor.set_global_steps.remote(global_steps)
        return report.metrics()

    async def _find_servers(self) -> list[tuple[Any, Replica]]:
        """On the first rank, the servers' Ray actors, and where they are; collective: all ranks
        raise `WeightSyncError` where one is gone, or silent.
        """
        found: list[tuple[Any, Replica]] = []
        limit_s = self._settings.request_timeout_s

        async def find() -> None:
            for server in self._servers:
                actor = ray.get_actor(server.actor_name)
                try:
                    async with asyncio.timeout(limit_s):
                        address = await actor.get_server_address.remote()
                except TimeoutError:
                    text = f"server {server.actor_name} did not answer within {limit_s:g} s"
                    raise WeightSyncError(text) from None
                url = server_url(*address)
                replica = Replica(
                    identity=actor._actor_id.hex(),  # another one after a restart
                    base_url=url,
                    client=SGLangServerClient(url, **server.access),
                    num_ranks=server.num_ranks,
                )
                found.append((actor, replica))

        assert self._group is not None, "made with the transport"
        await run_in_step(self._group, "find the servers", find() if self._is_source else None)
        return found

    def _all_have_base(self, replicas: Sequence[Replica]) -> bool:
        """True if all replicas have the weights that a LoRA adapter is for; collective, because the
        first rank alone knows them.
        """
        assert self._group is not None, "made with the transport"
        return holds_everywhere(self._group, self._have_base >= _identities(replicas))

    async def _sync_adapter(
        self, export: AdapterExport, replicas: Sequence[Replica], report: SyncReport
    ) -> None:
        """Have all replicas, which have the base weights, serve this state of a LoRA adapter."""
        from verl_sglang_sync.verl.adapter import collect_adapter

        engines = {replica.identity: replica.client for replica in replicas}
        num_ranks, is_leader = self._servers[0].num_ranks, self._is_source
        assert self._adapter is not None, "made with the transport"
        await self._adapter.sync(
            lambda: collect_adapter(*export(), num_ranks=num_ranks, is_leader=is_leader),
            engines,
            report,
        )

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[NamedTensor, None]:
        """Yield nothing: the engine's processes have received the weights themselves."""
        nothing: tuple[NamedTensor, ...] = ()
        for item in nothing:
            yield item

    @property
    def _settings(self) -> WeightSyncConfig:
        if not self._servers:
            raise ValueError("no rollout replica takes part in the weight sync")
        return self._servers[0].settings

    def _session_transport(self) -> SessionTransport:
        if self._transport is None:
            from verl_sglang_sync.verl.rollout import current_device

            device, groups, settings = current_device(), None, self._settings
            _check_nccl(device)
            if self._is_source:
                groups = UpdateGroups(
                    address=ray.util.get_node_ip_address().strip("[]"),
                    device=device,
                    timeout_s=settings.timeouts_s.get("group", settings.request_timeout_s),
                )
            group = self._group = TorchTrainerGroup(timeout_s=settings.request_timeout_s)
            self._adapter = AdapterSync(group)
            self._transport = disaggregated_transport(
                groups=groups, settings=settings, group=group, device=device
            )
        return self._transport


def _check_nccl(device: torch.device) -> None:
    """Refuse a trainer whose NCCL allocates otherwise than the engines' does.

    verl sets the variable in SGLang's processes; between processes that differ in it NCCL fails
    with an unhandled CUDA error. It is read once, so it must be there before the process starts.
    """
    value = os.environ.get(NCCL_VARIABLE)
    if device.type == "cuda" and value != "0":
        raise ValueError(
            f"{NCCL_VARIABLE}={value!r} in the trainer's processes: allowed: '0', as in SGLang's; "
            f"set ray_kwargs.ray_init.runtime_env.env_vars.{NCCL_VARIABLE}='0' as "
            "+weight_sync=disaggregated does, or the variable where a running Ray cluster starts"
        )


def _identities(replicas: Iterable[Replica]) -> frozenset[str]:
    return frozenset(replica.identity for replica in replicas)
