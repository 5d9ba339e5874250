"""Settings that the replica hands to SGLang's processes, in environment variables.

They are read only here, and validated where a recipe sets them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

HostBackup = Literal["auto", "on", "off"]
HOST_BACKUP_VARIABLE = "VERL_SGLANG_SYNC_HOST_BACKUP"


def requested_host_backup() -> HostBackup:
    """The setting of this process; the default is "on", which is SGLang's own backup."""
    return os.environ.get(HOST_BACKUP_VARIABLE, "on")  # type: ignore[return-value]


StaleRequests = Literal["wait", "refuse"]
STALE_REQUESTS_VARIABLE = "VERL_SGLANG_SYNC_STALE_REQUESTS"


@dataclass(frozen=True)
class GatePolicy:
    """How the gate treats a request that comes while it is closed.

    Attributes:
        kind: "wait" holds it until the gate opens; "refuse" answers it at once, with the reason.
        timeout_s: how long a request may wait before it is refused, in seconds.
    """

    kind: StaleRequests = "wait"
    timeout_s: float = 600.0

    def __str__(self) -> str:
        """The value of the environment variable."""
        return f"{self.kind} {self.timeout_s:g}"


def requested_gate_policy() -> GatePolicy:
    """The setting of this process, or the default."""
    kind, seconds = os.environ.get(STALE_REQUESTS_VARIABLE, str(GatePolicy())).split()
    return GatePolicy(kind, float(seconds))  # type: ignore[arg-type]


CUDA_GRAPH_TAG = "cuda_graph"
GRAPHS_VARIABLE = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
"""If true, SGLang captures the graphs of decoding under the tag "cuda_graph"; else under no tag, so
that releasing that tag frees nothing."""


def graphs_are_released_by_tag() -> bool:
    """True if this process captures its CUDA graphs under their tag."""
    return os.environ.get(GRAPHS_VARIABLE, "").lower() in ("1", "true", "yes", "on", "y", "t")
