"""Adds the metrics of colocated syncs to those of verl's training steps.

verl logs the metrics that its checkpoint engines return, but a colocated sync has no checkpoint
engine. So each replica's server keeps the metrics of its last sync, and the trainer collects them
at the end of a step. Disaggregated syncs return theirs from `SGLangSyncCheckpointEngine`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import ray

from verl_sglang_sync.report import PROVEN

TRAINERS = "verl.trainer.ppo.v1.trainer_base"


def show_metrics_in_steps() -> None:
    """If this is the trainer's process, have it log the syncs' metrics with its own."""
    trainers = sys.modules.get(TRAINERS)
    if trainers is None:
        return
    trainer = trainers.PPOTrainer
    original = trainer._consume_sync_metrics
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def consume(self: Any) -> dict[str, Any]:
        return {**_replica_metrics(self.checkpoint_manager.replicas), **original(self)}

    trainer._consume_sync_metrics = consume


def _replica_metrics(replicas: Iterable[Any]) -> dict[str, float]:
    servers = [replica.server_handle for replica in replicas]
    kept = ray.get([server.take_metrics.remote() for server in servers])
    return merged([metrics for metrics in kept if metrics is not None])


def merged(all_metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of all replicas in one: the longest seconds, 0 for proven if one is not, and else the
    sum, also of gigabytes per second, since the replicas are synced at the same time.
    """
    found: dict[str, float] = {}
    for metrics in all_metrics:
        for name, value in metrics.items():
            add = max if name.endswith("_s") and not name.endswith("_per_s") else float.__add__
            add = min if name == PROVEN else add
            found[name] = add(found[name], float(value)) if name in found else float(value)
    return found
