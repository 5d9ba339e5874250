"""The process group over which a trainer broadcasts weights to engines, as SGLang forms it.

SGLang's `init_weights_update_group` calls a function of its own in every engine rank; the trainer,
rank 0, has to call the same one to meet them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore


class MeetingPoint:
    """The store where a group's ranks meet, served by this process at a free port.

    A rank that waits here for another one, in a process that nobody can interrupt, is sent away by
    `close`. One that finds the port closed would try again for as long as torch's default timeout
    (30 minutes); `reopen` lets it in, so that the next `close` sends it away as well.

    Args:
        address: of this host, as the engines reach it.
        world_size: this process and all engine ranks.
        timeout_s: how long this process waits for another rank, in seconds.
    """

    def __init__(self, address: str, world_size: int, timeout_s: float) -> None:
        self._address = address
        self._world_size = world_size
        self._timeout = timedelta(seconds=timeout_s)
        self._server: TCPStore | None = self._store(0, is_master=True)
        self.port = self._server.port

    def connect(self) -> TCPStore:
        """A connection of this process's own; it does not keep the store open."""
        return self._store(self.port, is_master=False)

    def close(self) -> None:
        """Close the store; whoever waits in it gets an error at once."""
        self._server = None

    def reopen(self) -> None:
        """Open it again, empty, at the same port.

        Raises:
            torch.distributed.DistNetworkError: the port is taken.
        """
        self._server = self._store(self.port, is_master=True)

    def _store(self, port: int, *, is_master: bool) -> TCPStore:
        return TCPStore(
            self._address,
            port,
            self._world_size,
            is_master=is_master,
            wait_for_workers=False,
            timeout=self._timeout,
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
