"""The process group over which a trainer broadcasts weights to engines, as SGLang forms it.

SGLang's `init_weights_update_group` calls a function of its own in every engine rank; the trainer,
rank 0, has to call the same one to meet them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore


def open_store(address: str, world_size: int, timeout_s: float) -> TCPStore:
    """Start the store where the group's ranks meet, on a free port (`store.port`).

    Args:
        address: of this host, as the engines reach it.
        world_size: this process and all engine ranks.
        timeout_s: how long a rank waits for another, in seconds.
    """
    return TCPStore(
        address,
        0,
        world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def join_as_source(
    store: TCPStore, *, backend: str, world_size: int, name: str, timeout_s: float
) -> Any:
    """Become rank 0; returns the process group once the engines have come (gloo) or may (NCCL)."""
    from sglang.srt.utils import init_custom_process_group

    return init_custom_process_group(
        backend=backend,
        store=PrefixStore(name, store),
        world_size=world_size,
        rank=0,
        group_name=name,
        timeout=timedelta(seconds=timeout_s),
    )


def leave(group: Any, *, broken: bool) -> None:
    """End this process's part in the group.

    Args:
        group: what `join_as_source` returned.
        broken: True if a broadcast may be outstanding: it is aborted, not waited for.
    """
    if broken:
        group.abort()
    dist.destroy_process_group(group)
