"""Adds the metrics of colocated syncs to the metrics of verl's training steps.

verl logs the metrics that a checkpoint engine returns. A disaggregated sync returns metrics from
`SGLangSyncCheckpointEngine`. A colocated sync has no checkpoint engine. So each replica's server
keeps the metrics of its last sync, and the trainer collects these at the end of a step.
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
    """Make the trainer of this process log the syncs' metrics. Other processes are left alone."""
    trainers = sys.modules.get(TRAINERS)
    if trainers is None:  # only the trainer's process has imported verl's trainers
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
    last = ray.get([server.take_metrics.remote() for server in servers])
    return merged([metrics for metrics in last if metrics is not None])


def merged(all_metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Merge the metrics of all replicas into one dictionary.

    Seconds become the longest, "proven" becomes 0 if one replica is not proven, and all else is
    added.
    """
    result: dict[str, float] = {}
    for metrics in all_metrics:
        for name, value in metrics.items():
            # Replicas are synced at the same time, so gigabytes per second add up.
            add = max if name.endswith("_s") and not name.endswith("_per_s") else float.__add__
            add = min if name == PROVEN else add
            result[name] = add(result[name], float(value)) if name in result else float(value)
    return result
