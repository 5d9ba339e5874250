"""The arms of the colocated benchmark: ways to sync, each with a trainer that suits it.

- `native`: verl 0.9.1's own code with verl's own settings (host backup, named tensors, one request
  for each bucket).
- `flattened` and `compiled`: our presets with their defaults, the host backup included. With
  `compiled` the engine pulls the trainer's parameters.
- `compiled_proven`: compares the engine with the full export after every sync.
- `compiled_packed`: packs the export, as a trainer does that gathers its shards.
- `native_float32` and `compiled_float32`: export float32, verl's default, into bfloat16 engines.
- `copy_limit`: a copy of the same bytes within the device.
- `host_copy_limit`: a copy of the same bytes from pinned host memory to the device.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from verl_sglang_sync.commands.bench.cpu_tensors import share_tensors_by_name
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.server_client.client import SGLangServerClient
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sync.sharding_manager import SGLangShardingManager
from verl_sglang_sync.trainer_ranks import TrainerRanks

BUCKET_BYTES = 2048 << 20
SYNC_STAGES = (
    *("open", "export", "confirm", "plan", "gather", "pack", "send", "load"),
    *("learn", "publish", "reply", "prove"),
)
COUNTS = (
    *("num_buckets", "num_replayed", "num_pulled", "num_exchanged", "num_sent"),
    *("sent_bytes", "eager_reason", "staging_bytes", "host_memory_bytes"),
)


@dataclass(frozen=True)
class Arm:
    """One way to sync.

    Attributes:
        mode: the preset, or None for verl's own code.
        host_backup: True if the engine saves all weights on release, as verl launches the engine.
            False if it saves only what the load plan does not rewrite (`host_backup=auto`).
        dtype: the dtype of the trainer's weights, or None for the engine's dtype.
        settings: keys of the preset, where they differ from the defaults.
    """

    mode: str | None
    host_backup: bool = False
    dtype: torch.dtype | None = None
    settings: dict[str, Any] = field(default_factory=dict)


PACKED = {"routes": ["exchange"]}
ARMS = {
    "native": Arm(None, host_backup=True),
    "flattened": Arm("flattened", host_backup=True),
    "compiled": Arm("compiled"),
    "compiled_proven": Arm("compiled", settings={"prove_every_n_syncs": 1}),
    "compiled_packed": Arm("compiled", settings=PACKED),
    "native_float32": Arm(None, host_backup=True, dtype=torch.float32),
    "compiled_float32": Arm("compiled", dtype=torch.float32),
}
COPY_LIMIT = "copy_limit"
HOST_COPY_LIMIT = "host_copy_limit"


class NativeManager:
    """The sync of verl 0.9.1's own `ServerAdapter`, with the interface of the sharding manager.

    Args:
        url: the server's URL on the replica's leader, None on other ranks.
        config: folder of the engine's model.
        mesh: device mesh with the dimension "infer_tp", or None for a mesh of this rank alone.
    """

    report = None

    def __init__(self, url: str | None, config: Path, mesh: Any = None) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter

        # In a training on a CPU verl's platform does this, see recipes/cpu_platform.py.
        if os.environ.get("SGLANG_USE_CPU_ENGINE"):
            share_tensors_by_name()
        self._mesh = mesh or init_device_mesh("cpu", (1,), mesh_dim_names=("infer_tp",))
        self._engine: Any = None
        if url is not None:
            host, port = url.removeprefix("http://").split(":")
            self._engine = AsyncHttpServerAdapter(
                model_path=str(config), host=host, port=int(port), launch_server=False, timeout=600
            )

    async def release(self) -> None:
        if self._engine is not None:
            await self._engine.release_memory_occupation(tags=["kv_cache", "weights"])

    async def resume(self, tags: Sequence[str]) -> None:
        if self._engine is not None:
            await self._engine.resume_memory_occupation(tags=list(tags))

    async def sync(self, weights: Iterable[NamedTensor], *, version: str) -> None:
        from sglang.srt.weight_sync.utils import update_weights
        from verl.workers.rollout.sglang_rollout.utils import get_named_tensor_buckets

        async for batch in get_named_tensor_buckets(iter(weights), BUCKET_BYTES):
            await update_weights(
                engine=self._engine,
                params_batch=batch,
                device_mesh_key="infer_tp",
                device_mesh=self._mesh,
            )
        if self._engine is not None:
            await self._engine.flush_cache()
        torch.distributed.barrier()


def manager_of(arm: Arm, url: str, config: Path, device: torch.device) -> Any:
    """Make the manager of an arm: a sharding manager, or `NativeManager` for verl's own code."""
    if arm.mode is None:
        return NativeManager(url, config)
    return SGLangShardingManager(
        engine=SGLangServerClient(url, timeout_s=600),
        settings=WeightSyncConfig(
            mode=arm.mode,  # type: ignore[arg-type]
            bucket_bytes=BUCKET_BYTES,
            multi_stage_wake_up=True,
            free_cache_engine=True,
            **arm.settings,
        ),
        ranks=TrainerRanks(),
        device=device,
        replica=0,
    )


def notes_of(report: SyncReport | None) -> dict[str, Any]:
    """Return a sync's counts by route, and under "seconds" the seconds of trainer and engine.

    Args:
        report: the sync's report, or None for verl's own sync, of which nothing is recorded.
    """
    if report is None:
        return {"seconds": {}}
    seconds = {f"sync_{stage}": report.seconds.get(stage, 0.0) for stage in SYNC_STAGES}
    seconds |= {f"sync_engine_{work}": spent for work, spent in report.engine_seconds.items()}
    for stage, costs in report.stages.items():
        seconds |= {f"engine_{stage}_{tag}": max(cost["seconds"]) for tag, cost in costs.items()}
    return {"seconds": seconds, **{name: getattr(report, name) for name in COUNTS}}
