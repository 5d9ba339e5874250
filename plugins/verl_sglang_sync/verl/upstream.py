"""What verl lacks, alone or with the SGLang that is there: done where a preset is chosen.

This holds for verl 0.9.1 and for commit 1dda039 of verl's repository, whose version is 0.10.0.dev.
What the installed verl and SGLang do not need is left as it is.
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

PAUSE_STEP_S, ABORT_AGAIN_S = 0.01, 1.0
NUM_NAMED = 10
SEPARATE_ASYNC = "verl.trainer.ppo.v1.trainer_separate_async"


async def pause_by_aborting(manager: Any, *, timeout_s: float) -> None:
    """Let no request begin, and abort all that run, as `TokenizerManager.pause_generation` does in
    mode "abort". That one checks only once a second, which is longer than a sync.

    Raises:
        TimeoutError: requests still run after `timeout_s`. New ones may begin again.
    """
    async with manager.is_pause_cond:
        manager.is_pause = True
        abort_at, deadline = 0.0, time.monotonic() + timeout_s
        while await manager.model_update_lock.is_locked():  # by running requests
            if (now := time.monotonic()) >= abort_at:
                manager.abort_request(abort_all=True)
                abort_at = now + ABORT_AGAIN_S
            if now >= deadline:
                manager.is_pause = False
                manager.is_pause_cond.notify_all()
                raise TimeoutError(_still_running(manager, timeout_s))
            await asyncio.sleep(PAUSE_STEP_S)


async def end_pause(manager: Any) -> None:
    """Let requests go on to the scheduler. The scheduler itself is not told, because it does not
    take part in a pause by aborting.
    """
    async with manager.is_pause_cond:
        manager.is_pause = False
        manager.is_pause_cond.notify_all()


def _still_running(manager: Any, timeout_s: float) -> str:
    running = list(manager.rid_to_state)  # also those that wait for the pause to end
    names = ", ".join(map(str, running[:NUM_NAMED]))
    more = f" and {len(running) - NUM_NAMED} more" if len(running) > NUM_NAMED else ""
    return (
        f"the weights were not updated: requests still run {timeout_s:g} s after they were aborted "
        f"for the sync (known to the engine: {names or 'none'}{more}). The engine goes on with its "
        "old weights. If its scheduler only needs longer, raise weight_sync.request_timeout_s"
    )


def is_abort(error: Exception) -> bool:
    """True if a request was aborted before it ran: SGLang 0.5.17 raises an error then."""
    return type(error).__name__ == "RequestAbortedError"


@functools.cache
def waits_before_kv_cache() -> bool:
    """True if verl's worker waits until all ranks have freed their memory before it resumes the KV
    cache. Verl 0.9.1 does, commit 1dda039 does not: there a resume may find too little memory.
    """
    from verl.workers.engine_workers import ActorRolloutRefWorker

    return "barrier" in inspect.getsource(inspect.unwrap(ActorRolloutRefWorker.update_weights))


def fields(kind: Any) -> Any:
    """The fields of a dataclass or a struct; each has a `name` and a `default`."""
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return msgspec.structs.fields(kind) if is_struct else dataclasses.fields(kind)


def list_server_arguments() -> None:
    """Let verl list the fields of SGLang's `ServerArgs`, which is no dataclass from 0.5.20 on."""
    import verl.workers.rollout.sglang_rollout.async_sglang_server as server

    if not dataclasses.is_dataclass(server.ServerArgs):
        names = types.ModuleType("dataclasses")
        names.__dict__.update({**vars(dataclasses), "fields": fields})
        server.dataclasses = names


def complete_server_client() -> None:
    """Add two abstract methods that SGLang's `EngineBase` has from 0.5.21 on to verl's client. They
    are not called: our hooks begin and end every update in the engine.
    """
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
    """verl's separate-async trainer logs one line with `flush=True` where hybrid_engine=False: a
    TypeError at verl's default log level. Its logger takes that, too, and leaves it out.
    """
    logger = logging.getLogger(SEPARATE_ASYNC)

    def info(*args: Any, flush: bool = False, **kwargs: Any) -> None:
        logging.Logger.info(logger, *args, **{"stacklevel": 2, **kwargs})

    logger.info = info  # type: ignore[method-assign]


def tp_ranks_share_adapters() -> bool:
    """True if SGLang's request for a LoRA adapter has the tensors once for all TP ranks (0.5.14),
    not in a list by TP rank.
    """
    from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput

    return "serialized_tensors" in LoadLoRAAdapterFromTensorsReqInput.__annotations__
