"""The metrics of colocated syncs among those of verl's training steps.

verl logs what its checkpoint engines return; a sync to engines on the trainer's own GPUs returns
nothing. Each replica's server keeps the metrics of its last sync, and the trainer asks all of them
at the end of a step. A disaggregated sync needs none of this: `SGLangSyncCheckpointEngine`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import ray

TRAINERS = "verl.trainer.ppo.v1.trainer_base"


def show_metrics_in_steps() -> None:
    """Have the trainer of this process, if it is one, log the syncs' metrics with its own."""
    trainers = sys.modules.get(TRAINERS)
    if trainers is None:
        return
    trainer = trainers.PPOTrainer
    original = trainer._consume_sync_metrics
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def consume(self: Any) -> dict[str, Any]:
        return {**_of_replicas(self.checkpoint_manager.replicas), **original(self)}

    trainer._consume_sync_metrics = consume


def _of_replicas(replicas: Iterable[Any]) -> dict[str, float]:
    servers = [replica.server_handle for replica in replicas]
    kept = ray.get([server.take_metrics.remote() for server in servers])
    return merged([metrics for metrics in kept if metrics is not None])


def merged(all_metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of all replicas as one step's: the longest seconds, the sum of everything else.

    The replicas are synced at the same time, so that their gigabytes a second add up.
    """
    found: dict[str, float] = {}
    for metrics in all_metrics:
        for name, value in metrics.items():
            add = max if name.endswith("_s") and not name.endswith("_per_s") else float.__add__
            found[name] = add(found[name], float(value)) if name in found else float(value)
    return found
