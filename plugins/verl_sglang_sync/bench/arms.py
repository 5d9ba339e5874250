"""The arms of the colocated benchmark: ways to sync, each with a trainer that suits it.

`native` is verl 0.9.1's own code with its own settings (host backup, named tensors, one request per
bucket), `copy_limit` a copy of the same bytes within the device; the others are ours, with the host
backup that their preset gets. `compiled` is the preset as it is: the engine reads the trainer's
parameters in place. `compiled_packed` packs, as a trainer must that gathers its shards.
`native_float32` and `compiled_float32` export float32, verl's default, into engines of bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from verl_sglang_sync.bench.trainers import NamedTensor
from verl_sglang_sync.collective import TrainerGroup
from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.server_client import SGLangServerClient
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.sync.sharding_manager import SGLangShardingManager

BUCKET_BYTES = 2048 << 20
SYNC_STAGES = ("open", "export", "confirm", "gather", "pack", "load", "commit", "publish")
COUNTS = (
    *("num_buckets", "num_replayed", "num_pulled", "num_exchanged", "num_arranged", "num_sent"),
    *("sent_bytes", "eager_reason", "staging_bytes"),
)


@dataclass(frozen=True)
class Arm:
    """One way to sync; `settings` are keys of the preset.

    Attributes:
        mode: preset, None for verl's own code.
        host_backup: the engine saves all weights on release, as verl launches it; else
            `host_backup=auto`: only what the load plan does not rewrite.
        dtype: of the trainer's weights; None: the engine's.
    """

    mode: str | None
    host_backup: bool = False
    dtype: torch.dtype | None = None
    settings: dict[str, Any] = field(default_factory=dict)


PACKED = {"read_in_place": False}
ARMS = {
    "native": Arm(None, host_backup=True),
    "bucketed": Arm("bucketed", host_backup=True),
    "flattened": Arm("flattened", host_backup=True),
    "compiled": Arm("compiled"),
    "compiled_packed": Arm("compiled", settings={**PACKED, "keep_staging_buffers": True}),
    "compiled_packed_freed": Arm("compiled", settings=PACKED),
    "native_float32": Arm(None, host_backup=True, dtype=torch.float32),
    "compiled_float32": Arm("compiled", dtype=torch.float32),
}
COPY_LIMIT = "copy_limit"


class NativeSync:
    def __init__(self, url: str, config: Path) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self._engine = native_engine(url, config)
        self._mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("infer_tp",))

    async def release(self) -> None:
        await self._engine.release_memory_occupation(tags=["kv_cache", "weights"])

    async def resume(self, tag: str) -> None:
        await self._engine.resume_memory_occupation(tags=[tag])

    async def sync(self, weights: Iterable[NamedTensor]) -> dict[str, Any]:
        await native_sync(self._engine, self._mesh, weights)
        return {}


class OurSync:
    """The sharding manager, stage by stage as verl drives it."""

    def __init__(self, url: str, arm: Arm, device: torch.device) -> None:
        self._manager = SGLangShardingManager(
            engine=SGLangServerClient(url, timeout_s=600),
            settings=WeightSyncConfig(
                mode=arm.mode,  # type: ignore[arg-type]
                bucket_bytes=BUCKET_BYTES,
                multi_stage_wake_up=True,
                free_cache_engine=True,
                **arm.settings,
            ),
            group=TrainerGroup(),
            device=device,
            replica=0,
        )

    async def release(self) -> None:
        await self._manager.release()

    async def resume(self, tag: str) -> None:
        await self._manager.resume((tag,))

    async def sync(self, weights: Iterable[NamedTensor]) -> dict[str, Any]:
        await self._manager.sync(weights, version="0")
        return notes_of(self._manager.report)


def native_engine(url: str, config: Path | str) -> Any:
    from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter

    host, port = url.removeprefix("http://").split(":")
    return AsyncHttpServerAdapter(
        model_path=str(config), host=host, port=int(port), launch_server=False, timeout=600
    )


async def native_sync(
    engine: Any | None, mesh: Any, weights: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """What verl 0.9.1 does: `ServerAdapter.update_weights` without its worker around it. `engine`:
    see `native_engine`, on the replica's leader; `mesh` has the dimension "infer_tp".
    """
    from sglang.srt.weight_sync.utils import update_weights
    from verl.workers.rollout.sglang_rollout.utils import get_named_tensor_buckets

    async for batch in get_named_tensor_buckets(iter(weights), BUCKET_BYTES):
        await update_weights(
            engine=engine,
            params_batch=batch,
            device_mesh_key="infer_tp",
            device_mesh=mesh,
        )
    if engine is not None:
        await engine.flush_cache()


def notes_of(report: SyncReport) -> dict[str, Any]:
    """Seconds of a sync's stages, of the engine meanwhile, and of the engine's part of sleep and
    wake-up: `seconds`; and how it was sent and loaded.
    """
    seconds = {f"sync_{stage}": report.seconds.get(stage, 0.0) for stage in SYNC_STAGES}
    seconds |= {f"sync_engine_{what}": spent for what, spent in report.engine_seconds.items()}
    for stage, costs in report.stages.items():
        seconds |= {f"engine_{stage}_{tag}": max(cost["seconds"]) for tag, cost in costs.items()}
    return {"seconds": seconds, **{name: getattr(report, name) for name in COUNTS}}


def synchronize(device: torch.device) -> None:
    """Wait for all that this process has launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
