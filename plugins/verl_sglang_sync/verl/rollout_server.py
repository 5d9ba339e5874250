"""Description of a replica's server for trainers elsewhere, and the rollout of this process.

verl makes a rollout and a checkpoint engine in every rollout worker, and passes neither to the
other. So the rollout registers itself here, where the checkpoint engine finds it.
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
    """Description of a replica's server, which the first rollout worker sends to the trainer.

    Attributes:
        actor_name: name of the Ray actor around the server.
        num_ranks: number of TP ranks of the engine.
        settings: settings of the weight sync.
        format: names and dtypes in which the engine expects the weights.
        access: arguments of the server's client (`SGLangServerClient`): time limits and API keys.
    """

    actor_name: str
    num_ranks: int
    settings: WeightSyncConfig
    format: EngineFormat
    access: Mapping[str, Any]


class ServerRollout(Protocol):
    """A rollout that can describe its server."""

    def rollout_server(self) -> RolloutServer | None: ...


_rollout: weakref.ref[ServerRollout] | None = None


def register_rollout(rollout: ServerRollout) -> None:
    """Register the rollout that verl has made in this process. It replaces an earlier one."""
    # A weak reference, because verl decides how long a rollout lives.
    global _rollout
    _rollout = weakref.ref(rollout)


def rollout_of_this_process() -> ServerRollout:
    """Return the rollout that verl has made in this process.

    Raises:
        RuntimeError: there is none.
    """
    rollout = _rollout() if _rollout is not None else None
    if rollout is None:
        raise RuntimeError(
            "this process has no rollout of verl-sglang-sync: rollout.name is not 'sglang', or "
            "another plugin replaced the rollout's class. Run `verl-sglang-sync doctor`"
        )
    return rollout


def current_device() -> torch.device:
    """Return the device that verl runs this process on. A CPU has no index."""
    index = get_device_id()
    return torch.device(get_device_name(), index) if isinstance(index, int) else torch.device(index)
