"""Which host backup an engine gets: `weight_sync.host_backup`, and what the launch allows.

The replica passes the setting to SGLang's processes in one environment variable; it is read here
and nowhere else.
"""

from __future__ import annotations

import os
from typing import Any, Literal, get_args

Policy = Literal["auto", "on", "off"]
POLICIES: tuple[str, ...] = get_args(Policy)
ENVIRONMENT_VARIABLE = "VERL_SGLANG_SYNC_HOST_BACKUP"


def requested_policy() -> Policy:
    """The setting that this process was launched with; "on", SGLang's own, where there is none.

    Raises:
        ValueError: the variable is set to something else.
    """
    value = os.environ.get(ENVIRONMENT_VARIABLE, "on")
    if value not in POLICIES:
        raise ValueError(f"{ENVIRONMENT_VARIABLE}={value!r}: allowed: {', '.join(POLICIES)}")
    return value  # type: ignore[return-value]


def why_stock(server_args: Any, problem: str | None) -> str | None:
    """Why this launch keeps SGLang's own behaviour whatever was requested; None if it need not.

    Args:
        server_args: SGLang's `ServerArgs`.
        problem: why the memory under a tag cannot be enumerated, or None.
    """
    if not server_args.enable_memory_saver:
        return "there is no memory saver, so no weight is ever released"
    if not server_args.enable_weights_cpu_backup:
        return "the server was launched without a host backup"
    if server_args.device != "cuda":
        return f"the device is {server_args.device}"
    if server_args.speculative_algorithm:
        return "the weights of a draft model are released too"
    if server_args.cpu_offload_gb:
        return "cpu_offload_gb keeps weights on the host"
    return problem
