"""What the arms of `colocated` have in common, on one GPU and on several."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

BUCKET_BYTES = 2048 << 20
SYNC_STAGES = ("open", "export", "confirm", "gather", "pack", "load", "commit", "publish")


def native_engine(url: str, config: Path | str) -> Any:
    """verl 0.9.1's own client of a server."""
    from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter

    host, port = url.removeprefix("http://").split(":")
    return AsyncHttpServerAdapter(
        model_path=str(config), host=host, port=int(port), launch_server=False, timeout=600
    )


async def native_sync(
    engine: Any | None, mesh: Any, weights: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """What verl 0.9.1 does: `ServerAdapter.update_weights` without its worker around it.

    Args:
        engine: `native_engine` on the replica's leader, None on the other ranks.
        mesh: has the dimension "infer_tp".
        weights: `(name, full tensor)`.
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


def seconds_of(report: Any) -> dict[str, float]:
    """Seconds of a sync's stages, and of the engine meanwhile."""
    seconds = {stage: report.seconds.get(stage, 0.0) for stage in SYNC_STAGES}
    return seconds | {f"engine_{what}": spent for what, spent in report.engine_seconds.items()}


def counts_of(report: Any) -> dict[str, Any]:
    """How a sync was sent and loaded."""
    return {
        "num_buckets": report.num_buckets,
        "num_replayed": report.num_replayed,
        "num_pulled": report.num_pulled,
        "num_exchanged": report.num_exchanged,
        "num_arranged": report.num_arranged,
        "sent_bytes": report.sent_bytes,
        "eager_reason": report.eager_reason,
        "staging_bytes": report.staging_bytes,
    }


def synchronize(device: torch.device) -> None:
    """Wait for all that this process has launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
