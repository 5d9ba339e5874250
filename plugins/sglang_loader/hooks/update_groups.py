"""Hooks on SGLang's update groups: an engine joins, uses and leaves the groups of a trainer.

In these process groups a trainer sends to engines on other devices, see `broadcast.update_group`.
Groups of other names are left to SGLang.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

from sglang_loader.common.broadcast.update_group import (
    GROUP_PREFIX,
    GroupPlace,
    join,
    leave,
    mark_left,
    secret_of,
)
from sglang_loader.common.session.messages import SessionDescriptor, SessionError, check_signature
from sglang_loader.hooks.request_gate import note_other_update
from sglang_loader.session.serve import mapped, receiver
from sglang_loader.upstream import device_of, io_struct, model_of, tp_rank, update_groups

logger = logging.getLogger(__name__)

Original = Callable[..., Any]

MAX_GROUPS = 8
"""Two of each of four trainers. When this process joins another group, it leaves older ones."""

_secrets: dict[str, bytes] = {}
"""The secrets of the groups that this process is in, by name. SGLang keeps the process groups."""


def join_group(
    original: Original,
    owner: Any,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: str = "nccl",
) -> tuple[bool, str]:
    """Replace `init_weights_update_group` for our groups: join a group as the trainer does."""
    if not group_name.startswith(GROUP_PREFIX):
        arguments = (master_address, master_port, rank_offset, world_size, group_name, backend)
        joined: tuple[bool, str] = original(owner, *arguments)
        return joined
    place = GroupPlace(group_name, master_address, master_port, world_size)
    try:
        group = join(place, rank_offset + tp_rank(), device_of(model_of(owner)))
        update_groups(owner)[group_name] = group  # from here on the trainer may have us leave it
        _secrets[group_name] = secret_of(group)
    except Exception:
        logger.exception("cannot join %s", place)
        return False, f"cannot join {place}\n{traceback.format_exc()}"
    ours = [name for name in update_groups(owner) if name.startswith(GROUP_PREFIX)]
    for name in ours[:-MAX_GROUPS]:  # of trainers that died without a request to leave
        _leave(owner, name)
    return True, f"joined {group_name}"


def leave_group(original: Original, owner: Any, group_name: str) -> tuple[bool, str]:
    """Wrap `destroy_weights_update_group`: leave one of our groups, even amid a broadcast."""
    if not group_name.startswith(GROUP_PREFIX) or group_name not in update_groups(owner):
        left: tuple[bool, str] = original(owner, group_name)
        return left
    # SGLang would wait for outstanding collectives. A trainer that died between announcing a bucket
    # and sending it would block this process.
    _leave(owner, group_name)
    return True, f"left {group_name}"


def _leave(owner: Any, group_name: str) -> None:
    groups = update_groups(owner)
    group = groups[group_name]
    mark_left(group)
    is_waiting = receiver.is_waiting_in(group)
    receiver.drop_group(group)
    mapped.release()  # otherwise the trainer could not free that memory
    _secrets.pop(group_name, None)
    del group  # the last reference is `leave`'s
    leave(groups.pop(group_name), broken=is_waiting)


def groups_of(runner: Any, descriptor: SessionDescriptor) -> list[Any]:
    """Return the process groups of a session, or none if all buckets are mapped.

    The first is the group in which the session's trainer broadcasts. The second, if any, is the
    group in which all trainer ranks send.

    Raises:
        SessionError: a group was never formed or is broken, or the descriptor is forged.
    """
    if not descriptor.group:  # such a descriptor is not signed
        return []
    groups = []
    for name in filter(None, (descriptor.group, descriptor.senders)):
        group, secret = update_groups(runner).get(name), _secrets.get(name)
        if group is None or secret is None:
            formed = ", ".join(_secrets) or "none"
            raise SessionError(f"this engine rank is not in group {name!r}, but in: {formed}")
        if name == descriptor.group:
            check_signature(descriptor, secret)
        if receiver.is_waiting_in(group):
            raise SessionError(f"group {name!r} is not used again: a sync in it has failed")
        groups.append(group)
    return groups


def refuse_in_our_groups(original: Original, updater: Any, request: Any) -> Any:
    """Wrap `update_weights_from_distributed`: refuse in our groups, which only sessions use."""
    if not request.group_name.startswith(GROUP_PREFIX):
        return note_other_update(original, updater, request)
    # SGLang's method would receive the trainer's next broadcast, and gloo ends a process if lengths
    # differ.
    return io_struct().UpdateWeightsFromDistributedReqOutput(
        success=False,
        message=f"{request.group_name} is a group of verl-sglang-sync: only its sessions use it",
    )
