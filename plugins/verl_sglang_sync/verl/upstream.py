"""Amendments to verl, for faults of its own and for newer releases of SGLang.

They are for verl 0.9.1 and for commit 1dda039 of verl's repository, whose version is 0.10.0.dev. An
amendment is made if a preset is chosen, and if the installed verl and SGLang need it.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import functools
import inspect
import logging
import time
import types
from typing import Any

import msgspec

PAUSE_STEP_S, ABORT_EVERY_S = 0.01, 1.0
NUM_NAMED = 10
SEPARATE_ASYNC = "verl.trainer.ppo.v1.trainer_separate_async"


async def pause_by_aborting(manager: Any, *, timeout_s: float) -> None:
    """Hold new requests back, and abort all requests that run.

    Args:
        manager: SGLang's `TokenizerManager`.

    Raises:
        TimeoutError: requests still run after `timeout_s`. New requests may begin again.
    """
    # As the manager's own `pause_generation(mode="abort")`, which looks only once a second whether
    # requests still run. A second is longer than a sync.
    async with manager.is_pause_cond:
        manager.is_pause = True
        abort_at, deadline = 0.0, time.monotonic() + timeout_s
        while await manager.model_update_lock.is_locked():  # by running requests
            if (time_s := time.monotonic()) >= abort_at:
                manager.abort_request(abort_all=True)
                abort_at = time_s + ABORT_EVERY_S
            if time_s >= deadline:
                manager.is_pause = False
                manager.is_pause_cond.notify_all()
                raise TimeoutError(_still_running(manager, timeout_s))
            await asyncio.sleep(PAUSE_STEP_S)


async def end_pause(manager: Any) -> None:
    """Pass requests on to the scheduler again."""
    # The scheduler takes no part in a pause by aborting, so it needs no request.
    async with manager.is_pause_cond:
        manager.is_pause = False
        manager.is_pause_cond.notify_all()


def _still_running(manager: Any, timeout_s: float) -> str:
    running = list(manager.rid_to_state)  # also those that wait for the pause to end
    names = ", ".join(map(str, running[:NUM_NAMED])) or "none"
    if len(running) > NUM_NAMED:
        names += f" and {len(running) - NUM_NAMED} more"
    return (
        f"the weights were not updated: requests still run {timeout_s:g} s after they were aborted "
        f"for the sync (the engine lists: {names}). The engine goes on with its old weights. If "
        "the scheduler only needs longer, raise weight_sync.request_timeout_s"
    )


def is_abort(error: Exception) -> bool:
    """Return True if the error stands for a request that was aborted before it ran."""
    # SGLang 0.5.17 raises such an error.
    return type(error).__name__ == "RequestAbortedError"


@functools.cache
def waits_before_kv_cache() -> bool:
    """Return True if verl's worker has a barrier before it resumes the KV cache."""
    # Without a barrier a rank may resume while another rank still holds memory. verl 0.9.1 has the
    # barrier, commit 1dda039 lacks it.
    from verl.workers.engine_workers import ActorRolloutRefWorker

    return "barrier" in inspect.getsource(inspect.unwrap(ActorRolloutRefWorker.update_weights))


def fields(kind: Any) -> Any:
    """Return the fields of a dataclass or a struct. Each has a `name` and a `default`."""
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return msgspec.structs.fields(kind) if is_struct else dataclasses.fields(kind)


def list_server_arguments() -> None:
    """Make verl list the fields of SGLang's `ServerArgs` in every release of SGLang."""
    # `ServerArgs` is no dataclass from SGLang 0.5.20 on.
    import verl.workers.rollout.sglang_rollout.async_sglang_server as server

    if not dataclasses.is_dataclass(server.ServerArgs):
        names = types.ModuleType("dataclasses")
        names.__dict__.update({**vars(dataclasses), "fields": fields})
        server.dataclasses = names


def complete_server_client() -> None:
    """Add two methods to verl's client that SGLang's `EngineBase` requires from 0.5.21 on."""
    # Nobody calls them. Our hooks begin and end every update in the engine.
    from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter

    async def begin_weight_update(self: Any, selector: str = "all") -> Any:
        return await self._make_async_request("begin_weight_update", {"selector": selector})

    async def end_weight_update(self: Any) -> Any:
        return await self._make_async_request("end_weight_update", {})

    for method in (begin_weight_update, end_weight_update):
        if method.__name__ in AsyncHttpServerAdapter.__abstractmethods__:
            setattr(AsyncHttpServerAdapter, method.__name__, method)
    abc.update_abstractmethods(AsyncHttpServerAdapter)


def log_without_flush() -> None:
    """Make the logger of verl's separate-async trainer accept `flush=True`."""
    # With hybrid_engine=False that trainer logs one line with `flush=True`, as if it printed. That
    # is a TypeError at verl's default log level.
    logger = logging.getLogger(SEPARATE_ASYNC)

    def info(*args: Any, flush: bool = False, **kwargs: Any) -> None:
        logging.Logger.info(logger, *args, **{"stacklevel": 2, **kwargs})

    logger.info = info  # type: ignore[method-assign]


def tp_ranks_share_adapters() -> bool:
    """Return True if SGLang's request for a LoRA adapter has the tensors once for all TP ranks."""
    # True with SGLang 0.5.14. Other releases have a list by TP rank.
    from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput

    return "serialized_tensors" in LoadLoRAAdapterFromTensorsReqInput.__annotations__
