"""Settings that the replica hands to SGLang's processes, in environment variables.

They are read here and nowhere else; what they may be is checked where a recipe sets them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

HostBackup = Literal["auto", "on", "off"]
HOST_BACKUP_VARIABLE = "VERL_SGLANG_SYNC_HOST_BACKUP"


def requested_host_backup() -> HostBackup:
    """The setting that this process was launched with; "on", SGLang's own, where there is none."""
    return os.environ.get(HOST_BACKUP_VARIABLE, "on")  # type: ignore[return-value]


StaleRequests = Literal["wait", "refuse"]
STALE_REQUESTS_VARIABLE = "VERL_SGLANG_SYNC_STALE_REQUESTS"


@dataclass(frozen=True)
class GatePolicy:
    """What happens to a request that comes while the gate is closed.

    Attributes:
        kind: "wait" holds it until the gate opens; "refuse" answers it at once, with the reason.
        timeout_s: after which a request that waits is refused too.
    """

    kind: StaleRequests = "wait"
    timeout_s: float = 600.0

    def __str__(self) -> str:
        """As it stands in the environment variable."""
        return f"{self.kind} {self.timeout_s:g}"


def requested_gate_policy() -> GatePolicy:
    """The setting that this process was launched with; the default where there is none."""
    kind, seconds = os.environ.get(STALE_REQUESTS_VARIABLE, str(GatePolicy())).split()
    return GatePolicy(kind, float(seconds))  # type: ignore[arg-type]


CUDA_GRAPH_TAG = "cuda_graph"
GRAPHS_VARIABLE = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
"""With it SGLang captures the graphs of decoding under the tag "cuda_graph"; else they are under
no tag, and releasing that tag frees nothing."""


def graphs_are_released_by_tag() -> bool:
    """True if this process captures its CUDA graphs under their tag."""
    return os.environ.get(GRAPHS_VARIABLE, "").lower() in ("1", "true", "yes", "on", "y", "t")
