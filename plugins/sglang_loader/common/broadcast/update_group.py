"""The process group in which a trainer sends weights to engines.

The trainer's ranks come first in the group, the engines' ranks follow. All ranks call `join`, the
engines' in the hook on SGLang's `init_weights_update_group`. They wait for each other in a store
that the trainer's first rank serves (`MeetingPoint`). Then all ranks connect. NCCL makes its
communicator in a group's first collective, and a pair's connection with the first bytes between
them. Both block until the ranks have come. That must not happen in the first sync, which the ranks
do not start together.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import _get_process_group_store, default_pg_timeout

from sglang_loader.common.broadcast.broadcast import (
    WORD,
    Broadcast,
    BroadcastError,
    Transfer,
    all_to_all,
)
from sglang_loader.common.threads import in_thread

logger = logging.getLogger(__name__)

GROUP_PREFIX = "weight_sync_"
"""The prefix of the names of our groups."""

REACH_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0
"""The limit for a connection to the store and its first answer. torch looks up the names of the
hosts that it connects. The store looks them up one after another, and waits 5 to 10 s for each name
that DNS does not answer.
"""
LEAVE_TIMEOUT_S = {"nccl": 10.0, "gloo": 1.0}
"""Longest wait, by backend. gloo may wait for a transfer that failed peers have never ended, and
nobody needs the memory that its group has.
"""
GROUP_GRACE_S = 5.0
"""Seconds that an engine waits longer than the trainer in a group, as that names the late rank."""
TRANSFER_MARGIN_S = GROUP_GRACE_S + 2.0
"""Seconds that gloo waits longer than the trainer for a transfer, so that the engine's limit comes
first.
"""
CONNECT_TRIES = 5
"""gloo waits for a connection this many times its time limit, and for an address once its limit."""
LIMITED_BY = "timeouts_s.group, else request_timeout_s"
"""The setting that limits how long a group takes to form."""
_NUM_JOINED = "here"
_MEETING = "meeting"
_ALL_JOINED = "all here"
_CALLED_OFF = "called off"
_SECRET = "secret"
_LEFT = "left"
_NUM_TRAINERS = "num_trainers"
_LIMIT_S = "limit_s"
_TRANSFER_S = "transfer_s"
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@dataclass(frozen=True)
class GroupPlace:
    """The address of a group's store, and the group's name, which starts with `GROUP_PREFIX`."""

    name: str
    address: str
    port: int
    world_size: int


class MeetingPoint:
    """The store in which a group's ranks meet, served by this process at a free port.

    Args:
        address: of this host, as the engines reach it.
        num_trainers: the number of trainer ranks. They are the first ranks of the group.
        limit_s: seconds for which a rank waits in the store for all ranks, and again for their
            connections. If a rank has come and does not send its address, the wait takes a fifth of
            this.
        transfer_s: longest time of a transfer in the group, in seconds.
    """

    def __init__(
        self,
        address: str,
        world_size: int,
        num_trainers: int,
        *,
        limit_s: float,
        transfer_s: float,
    ) -> None:
        self._server: TCPStore | None = TCPStore(
            address, 0, world_size, is_master=True, wait_for_workers=False
        )
        self._server.set(_NUM_TRAINERS, str(num_trainers))
        self._server.set(_LIMIT_S, str(limit_s))
        self._server.set(_TRANSFER_S, str(transfer_s))
        self.port = self._server.port

    def call_off(self) -> None:
        """End the meeting. Ranks that wait in the store, or come later, get an error."""
        if self._server is not None:
            self._server.compare_set(_MEETING, "", _CALLED_OFF)

    def close(self) -> None:
        """Close the store. Ranks that use the store get an error, later ranks cannot reach it."""
        self._server = None


def check_reachable(address: str, port: int) -> None:
    """Raise OSError if no process listens at the address."""
    # torch would try for 30 minutes, and block the scheduler.
    socket.create_connection((address, port), REACH_TIMEOUT_S).close()


def join(place: GroupPlace, rank: int, device: torch.device) -> Any:
    """Join the group as one of its ranks. Return the connected group once all ranks have come.

    Args:
        device: of the buffers that will be sent or received. The group uses NCCL on a GPU, else
            gloo.

    Raises:
        OSError: no process serves the store.
        BroadcastError: a rank did not come or connect within the limit, or the store was closed.
    """
    from sglang.srt.utils import init_custom_process_group

    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has its own, and starts with GPU 0
    check_reachable(place.address, place.port)
    # A short limit for the first answers, until the trainer's own limit is read from the store.
    answer_s = timedelta(seconds=ANSWER_TIMEOUT_S)
    store = TCPStore(
        place.address, place.port, place.world_size, wait_for_workers=False, timeout=answer_s
    )
    num_trainers, limit_s = int(store.get(_NUM_TRAINERS)), float(store.get(_LIMIT_S))
    transfer_s = float(store.get(_TRANSFER_S))
    limit, group = timedelta(seconds=limit_s), None
    store.set_timeout(limit)
    try:
        meet(store, place.world_size, limit)  # a wait for a rank in NCCL could never be ended
        with without_nccl_watchdog():
            group = init_custom_process_group(
                backend=backend_of(device),
                store=store,
                world_size=place.world_size,
                rank=rank,
                group_name=place.name,
                timeout=limit / CONNECT_TRIES,
            )
        # Each wait for a transfer has its own limit, which comes first.
        of_gloo = timedelta(seconds=max(limit_s, transfer_s) + TRANSFER_MARGIN_S)
        group.set_timeout(of_gloo if device.type == "cpu" else default_pg_timeout)
        _connect(group, num_trainers, device, limit_s)
    except Exception as error:
        # A group that is only partly connected is of no use.
        if group is not None:
            leave(group, broken=True)
        if not isinstance(error, RuntimeError):
            raise
        raise BroadcastError(
            f"not all ranks of {place.name} came and connected (limit: {limit_s:g} s, of "
            f"{LIMITED_BY}): {error}"
        ) from None
    return group


def secret_of(group: Any) -> bytes:
    """Return the secret of the group's ranks, which signs session descriptors.

    The first rank that calls this makes the secret.
    """
    store = _get_process_group_store(group)
    secret: bytes = store.compare_set(_SECRET, "", secrets.token_hex(16))
    return secret


def backend_of(device: torch.device) -> str:
    """Return "gloo" for a CPU, else "nccl"."""
    return "gloo" if device.type == "cpu" else "nccl"


@contextmanager
def without_nccl_watchdog() -> Iterator[None]:
    """Disable torch's watchdog for the NCCL groups that the body makes."""
    # The watchdog would end the process if a peer dies or takes long. Here each wait for a transfer
    # has a limit, and aborts the group.
    setting = os.environ.get(_ERROR_HANDLING)
    os.environ[_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if setting is None:
            del os.environ[_ERROR_HANDLING]
        else:
            os.environ[_ERROR_HANDLING] = setting


def _connect(group: Any, num_trainers: int, device: torch.device, limit_s: float) -> None:
    """Run the group's first collectives, which connect its ranks."""
    byte = Broadcast(torch.zeros(1, dtype=torch.uint8, device=device), group)
    byte.wait(limit_s, "the first byte of the update group")
    words = _first_words(group, num_trainers, device)
    words.wait(limit_s, "the first word of every trainer rank")


def _first_words(group: Any, num_trainers: int, device: torch.device) -> Transfer:
    """Send a word from every trainer rank to every engine rank."""
    is_trainer = [rank < num_trainers for rank in range(group.size())]
    own = is_trainer[group.rank()]
    sends = [WORD.itemsize * (own and not peer) for peer in is_trainer]
    receives = [WORD.itemsize * (peer and not own) for peer in is_trainer]
    sent, received = (
        torch.zeros(sum(sizes), dtype=torch.uint8, device=device) for sizes in (sends, receives)
    )
    return Transfer(all_to_all(sent, sends, received, receives, group), device)


def meet(store: Any, num_ranks: int, limit: timedelta) -> None:
    """Wait in a store until all ranks have come.

    Raises:
        RuntimeError: a rank does not come within the limit, the meeting is called off, or the store
            is closed.
    """
    if store.add(_NUM_JOINED, 1) == num_ranks:
        store.compare_set(_MEETING, "", _ALL_JOINED)
    store.wait([_MEETING], limit)
    if store.get(_MEETING) != _ALL_JOINED.encode():
        raise RuntimeError("the trainer has called it off")


def mark_left(group: Any) -> None:
    """Record in the group's store that this rank leaves, so that `was_left` is true everywhere."""
    with suppress(dist.DistError):  # the store went with the trainer
        _get_process_group_store(group).set(_LEFT, "")


def was_left(group: Any) -> bool:
    """Return True if a rank has left, so that the group must be formed anew."""
    return bool(_get_process_group_store(group).check([_LEFT]))


def leave(group: Any, *, broken: bool) -> None:
    """Leave the group. Return after the backend's `LEAVE_TIMEOUT_S` at the latest.

    All ranks should leave at the same time.

    Args:
        group: as `join` returned it. The caller should keep no reference.
        broken: if True, a transfer may be outstanding, and is aborted.
    """
    # In a thread, because NCCL may wait for the other ranks on this host, and one may be dead.
    # The thread has the last reference: when it is dropped, gloo waits for outstanding collectives.
    limit_s = _leave_limit_s(group)
    held = [group]
    del group

    def step() -> None:
        group = held.pop()
        if broken:
            _end_collectives(group)
        dist.destroy_process_group(group)

    _run_with_limit(step, "leave the update group", limit_s)


def abort(group: Any) -> None:
    """Abort all transfers of the group in this process. The group cannot be used any more."""
    limit_s = _leave_limit_s(group)
    _run_with_limit(partial(_end_collectives, group), "abort the update group", limit_s)


def _end_collectives(group: Any) -> None:
    """Make all collectives of the group fail, in this process and in its peers."""
    group.abort()
    if dist.get_backend(group) != "gloo":
        return
    # gloo has no abort, and a group waits for its collectives when it is destroyed. But a receive
    # that times out makes gloo close all connections of the group. A receive from a peer whose
    # connection has already failed has no such effect, so all peers are tried.
    nothing = torch.empty(1, dtype=torch.uint8)
    for peer in set(range(group.size())) - {group.rank()}:
        with suppress(RuntimeError):
            group.recv([nothing], peer, 0).wait(timedelta(milliseconds=1))


def _leave_limit_s(group: Any) -> float:
    return LEAVE_TIMEOUT_S[dist.get_backend(group)]


def _run_with_limit(step: Callable[[], None], name: str, limit_s: float) -> None:
    # Each thread has its own current GPU.
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run(_: object) -> None:
        if gpu is not None:
            torch.cuda.set_device(gpu)
        step()

    ended = in_thread(run, "weight-sync-leave")
    if not wait([ended], limit_s).done:
        logger.warning("it takes more than %g s to %s, going on", limit_s, name)
    elif (error := ended.exception()) is not None:
        logger.error("failed to %s", name, exc_info=error)
