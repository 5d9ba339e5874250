"""The process group in which a trainer sends weights to engines.

The trainer's ranks, which are the first, and the engines' (in the hook on SGLang's
`init_weights_update_group`) call `join`. They wait for each other in a store that the trainer's
first rank serves (`MeetingPoint`). Then all ranks connect: NCCL makes its communicator in a group's
first collective, and a pair's connection in the first bytes between them, and blocks until both
ranks have come. That must not happen in the first sync, which the ranks do not start together.
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
"""Prefix of the names of our groups."""

REACH_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0
"""For a connection to the store, and its first answer. torch looks up the names of the hosts that
it connects, the store one after another, and for each that DNS does not answer it waits 5 to 10 s.
"""
LEAVE_TIMEOUT_S = 10.0
CONNECT_TRIES = 5
"""For a connection gloo waits so many times as long as it is told; for an address just so long."""
LIMITED_BY = "timeouts_s.group, else request_timeout_s"
"""The setting that limits how long a group takes to form."""
_HERE = "here"
_MEETING = "meeting"
_ALL_HERE = "all here"
_CALLED_OFF = "called off"
_SECRET = "secret"
_LEFT = "left"
_NUM_TRAINERS = "num_trainers"
_LIMIT_S = "limit_s"
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@dataclass(frozen=True)
class GroupPlace:
    """Address of a group's store, and the group's name, which starts with `GROUP_PREFIX`."""

    name: str
    address: str
    port: int
    world_size: int


class MeetingPoint:
    """The store where a group's ranks meet, served by this process at a free port.

    Args:
        address: of this host, as the engines reach it.
        num_trainers: so many of the group's ranks, the first ones, are the trainer's.
        limit_s: seconds for which a rank waits there for the others, and again to be connected; one
            that has come and does not say its address is waited for a fifth of that.
    """

    def __init__(self, address: str, world_size: int, num_trainers: int, *, limit_s: float) -> None:
        self._server: TCPStore | None = TCPStore(
            address, 0, world_size, is_master=True, wait_for_workers=False
        )
        self._server.set(_NUM_TRAINERS, str(num_trainers))
        self._server.set(_LIMIT_S, str(limit_s))
        self.port = self._server.port

    def call_off(self) -> None:
        """Ranks that wait in the store for others, and those that come later, get an error."""
        if self._server is not None:
            self._server.compare_set(_MEETING, "", _CALLED_OFF)

    def close(self) -> None:
        """Close the store: ranks that use it get an error, later ones cannot reach it."""
        self._server = None


def check_reachable(address: str, port: int) -> None:
    """Raise OSError if nobody listens: torch would try for 30 minutes, and block the scheduler."""
    socket.create_connection((address, port), REACH_TIMEOUT_S).close()


def join(place: GroupPlace, rank: int, device: torch.device) -> Any:
    """Become a rank of the group; returns it, connected, once all ranks have come. `device`: of the
    buffers that will be sent or received; with a GPU's the group uses NCCL, else gloo.

    Raises:
        OSError: nobody serves the store.
        BroadcastError: a rank did not come or connect within the limit, or the store was closed.
    """
    from sglang.srt.utils import init_custom_process_group

    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has its own, and starts with GPU 0
    check_reachable(place.address, place.port)
    answer_s = timedelta(seconds=ANSWER_TIMEOUT_S)
    store = TCPStore(
        place.address, place.port, place.world_size, wait_for_workers=False, timeout=answer_s
    )
    num_trainers, limit_s = int(store.get(_NUM_TRAINERS)), float(store.get(_LIMIT_S))
    limit, group = timedelta(seconds=limit_s), None
    store.set_timeout(limit)
    try:
        meet(store, place.world_size, limit)  # nothing ends a rank's wait for others in NCCL
        with errors_left_to_us():
            group = init_custom_process_group(
                backend=backend_of(device),
                store=store,
                world_size=place.world_size,
                rank=rank,
                group_name=place.name,
                timeout=limit / CONNECT_TRIES,
            )
        group.set_timeout(default_pg_timeout)  # whoever waits for a broadcast has a limit
        _connect(group, num_trainers, device, limit_s)
    except Exception as error:
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
    """A secret of the group's ranks, made by the first that asks; it signs session descriptors."""
    store = _get_process_group_store(group)
    secret: bytes = store.compare_set(_SECRET, "", secrets.token_hex(16))
    return secret


def backend_of(device: torch.device) -> str:
    """ "gloo" on a CPU, else "nccl"."""
    return "gloo" if device.type == "cpu" else "nccl"


@contextmanager
def errors_left_to_us() -> Iterator[None]:
    """Without torch's watchdog for a NCCL group made in the body, which would end the process if a
    peer dies or takes long: here whoever waits for a transfer notices, and aborts the group.
    """
    before = os.environ.get(_ERROR_HANDLING)
    os.environ[_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ERROR_HANDLING]
        else:
            os.environ[_ERROR_HANDLING] = before


def _connect(group: Any, num_trainers: int, device: torch.device, limit_s: float) -> None:
    """The group's first collectives."""
    byte = Broadcast(torch.zeros(1, dtype=torch.uint8, device=device), group)
    byte.wait(limit_s, "the first byte of the update group")
    words = _first_words(group, num_trainers, device)
    words.wait(limit_s, "the first word of every trainer rank")


def _first_words(group: Any, num_trainers: int, device: torch.device) -> Transfer:
    """Every trainer rank sends every engine rank a word."""
    is_trainer = [rank < num_trainers for rank in range(group.size())]
    own = is_trainer[group.rank()]
    sends = [WORD.itemsize * (own and not each) for each in is_trainer]
    receives = [WORD.itemsize * (each and not own) for each in is_trainer]
    sent, received = (
        torch.zeros(sum(sizes), dtype=torch.uint8, device=device) for sizes in (sends, receives)
    )
    return Transfer(all_to_all(sent, sends, received, receives, group), device)


def meet(store: Any, num_ranks: int, limit: timedelta) -> None:
    """Wait in a store until all ranks are there.

    Raises:
        RuntimeError: a rank does not come within the limit, or the meeting is called off, or the
            store is closed.
    """
    if store.add(_HERE, 1) == num_ranks:
        store.compare_set(_MEETING, "", _ALL_HERE)
    store.wait([_MEETING], limit)
    if store.get(_MEETING) != _ALL_HERE.encode():
        raise RuntimeError("the trainer has called it off")


def say_left(group: Any) -> None:
    """Note in the group's store that this rank leaves, so that `was_left` is true on all ranks."""
    with suppress(dist.DistError):  # the store went with the trainer
        _get_process_group_store(group).set(_LEFT, "")


def was_left(group: Any) -> bool:
    """True if a rank has left, so that the group must be formed anew."""
    return bool(_get_process_group_store(group).check([_LEFT]))


def leave(group: Any, *, broken: bool) -> None:
    """Leave the group; returns after `LEAVE_TIMEOUT_S` at the latest.

    NCCL may wait for the other ranks on this host, and one of them may be dead. So all ranks should
    leave at the same time, and each does it in a thread.

    Args:
        group: as `join` returned it. The caller should keep no reference, so that the thread has
            the last one: gloo waits for outstanding collectives when that is dropped.
        broken: a transfer may be outstanding: abort it instead of waiting for it.
    """
    held = [group]
    del group

    def step() -> None:
        group = held.pop()
        if broken:
            _end_collectives(group)
        dist.destroy_process_group(group)

    _run_for_a_while(step, "leave the update group")


def abort(group: Any) -> None:
    """Abort all transfers of the group in this process; the group cannot be used any more."""
    _run_for_a_while(lambda: _end_collectives(group), "abort the update group")


def _end_collectives(group: Any) -> None:
    """Make all collectives of the group fail in this process, and in others those with this rank.

    gloo has no abort, and a group waits for its collectives when it is destroyed. But a receive
    that times out makes gloo close all connections of the group. It is tried from every rank, since
    one whose connection has already failed has no such effect.
    """
    group.abort()
    if dist.get_backend(group) != "gloo":
        return
    nothing = torch.empty(1, dtype=torch.uint8)
    for peer in set(range(group.size())) - {group.rank()}:
        with suppress(RuntimeError):
            group.recv([nothing], peer, 0).wait(timedelta(milliseconds=1))


def _run_for_a_while(step: Callable[[], None], what: str) -> None:
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run(_: object) -> None:
        if gpu is not None:
            torch.cuda.set_device(gpu)
        step()

    ended = in_thread(run, "weight-sync-leave")
    if not wait([ended], LEAVE_TIMEOUT_S).done:
        logger.warning("it takes more than %g s to %s; going on", LEAVE_TIMEOUT_S, what)
    elif (error := ended.exception()) is not None:
        logger.error("failed to %s", what, exc_info=error)
