"""A replica's server as trainers elsewhere need it, and the rollout that leads it in this process.

verl makes a rollout and a checkpoint engine in every rollout worker, and passes neither to the
other. So the rollout registers itself here, and the checkpoint engine looks it up.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from verl.utils.device import get_device_id, get_device_name

from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.verl.engine_format import EngineFormat


@dataclass(frozen=True, kw_only=True)
class RolloutServer:
    """A replica's server, as its first rollout worker describes it to the trainer.

    Attributes:
        actor_name: name of the Ray actor around the replica's server.
        num_ranks: number of tensor-parallel ranks of the engine.
        format: names and dtypes in which the engine expects the weights.
        access: arguments of the server's client (`SGLangServerClient`): time limits and API keys.
    """

    actor_name: str
    num_ranks: int
    settings: WeightSyncConfig
    format: EngineFormat
    access: Mapping[str, Any]


class ServerRollout(Protocol):
    """A rollout that can describe the server which it leads."""

    def rollout_server(self) -> RolloutServer | None: ...


_rollout: weakref.ref[ServerRollout] | None = None


def register_rollout(rollout: ServerRollout) -> None:
    """Register the rollout that verl has made in this process. It replaces an earlier one."""
    global _rollout
    _rollout = weakref.ref(rollout)


def rollout_of_this_process() -> ServerRollout:
    """Return the rollout that verl has made in this process; there is at most one."""
    rollout = _rollout() if _rollout is not None else None
    if rollout is None:
        raise RuntimeError(
            "this process has no rollout of verl-sglang-sync: rollout.name is not 'sglang', or "
            "another plugin replaced the rollout's class; see `verl-sglang-sync doctor`"
        )
    return rollout


def current_device() -> torch.device:
    """Return the device that verl runs this process on. A CPU has no index."""
    index = get_device_id()
    return torch.device(get_device_name(), index) if isinstance(index, int) else torch.device(index)
