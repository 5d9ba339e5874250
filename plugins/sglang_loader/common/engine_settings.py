"""Settings that the replica passes to SGLang's processes, in environment variables.

The variables are read only here, and validated where a recipe sets them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

HostBackup = Literal["auto", "on"]
HOST_BACKUP_VARIABLE = "VERL_SGLANG_SYNC_HOST_BACKUP"


def requested_host_backup() -> HostBackup:
    """Return the setting of this process. The default "on" is SGLang's own backup."""
    return os.environ.get(HOST_BACKUP_VARIABLE, "on")  # type: ignore[return-value]


STALE_REQUESTS_VARIABLE = "VERL_SGLANG_SYNC_STALE_REQUESTS_TIMEOUT_S"
STALE_REQUESTS_TIMEOUT_S = 600.0


def requested_stale_requests_timeout_s() -> float:
    """Return the longest wait of a request at the closed gate of this process, in seconds."""
    return float(os.environ.get(STALE_REQUESTS_VARIABLE, STALE_REQUESTS_TIMEOUT_S))


LOAD_PLANS_VARIABLE = "VERL_SGLANG_SYNC_LOAD_PLANS"
"""The folder of saved load plans. If the variable is set and empty, no plan is saved or read."""


def load_plans_folder() -> Path | None:
    """Return the folder in which this process saves load plans, or None if it saves none."""
    if (chosen := os.environ.get(LOAD_PLANS_VARIABLE)) is not None:
        return Path(chosen) if chosen else None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "verl-sglang-sync" / "load-plans"


CUDA_GRAPH_TAG = "cuda_graph"
GRAPHS_VARIABLE = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
"""SGLang's variable. If true, SGLang captures the graphs of decoding under the tag "cuda_graph".
Otherwise the graphs have no tag, and a release of "cuda_graph" frees nothing."""


def graphs_are_released_by_tag() -> bool:
    """Return True if this process captures its CUDA graphs under their tag."""
    return os.environ.get(GRAPHS_VARIABLE, "").lower() in ("1", "true", "yes", "on", "y", "t")


REQUESTS_TAG = "requests"
"""A tag without memory. After a release of this tag alone the engine refuses every request at once,
until a resume of the tag."""

TAKEN_BY_TRAINER = (
    "the trainer has taken this engine out of rotation, and another one serves requests"
)
"""The reason of such a refusal."""
