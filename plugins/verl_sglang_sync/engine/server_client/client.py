"""The clients of one SGLang server: what they share, then the asynchronous and the synchronous one.

Every operation either succeeded on the server or raised a `ServerError`. Both clients may be used
from any thread and any event loop, and keep their connections open from call to call.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from sglang_loader.common.stage_costs import stage_costs_in
from verl_sglang_sync.engine.server_client import operations
from verl_sglang_sync.engine.server_client.core import ServerAccess, ServerCore
from verl_sglang_sync.engine.server_client.loop_thread import LoopThread
from verl_sglang_sync.engine.server_client.operations import Call

CLOSE_TIMEOUT_S = 5.0

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Client:
    """What both clients are made of; the arguments are those of `ServerAccess`."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float,
        timeouts_s: Mapping[str, float] | None = None,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        rank: int | None = None,
        replica: int | None = None,
    ) -> None:
        self._core = ServerCore(
            ServerAccess(
                base_url=base_url.rstrip("/"),
                timeout_s=timeout_s,
                timeouts_s=dict(timeouts_s or {}),
                api_key=api_key,
                admin_api_key=admin_api_key,
                rank=rank,
                replica=replica,
            )
        )
        self._loop = LoopThread("sglang-server-client", self._core.close)
        weakref.finalize(self, self._loop.stop)

    def submit(self, call: Call) -> Future[Any]:
        """Start one operation; the future gets its reply. Cancelling the future cancels it."""
        return self._loop.submit(self._core.send(call))

    def _close(self) -> None:
        if thread := self._loop.stop():
            thread.join(CLOSE_TIMEOUT_S)


def _nothing_in(reply: Any) -> None:
    """For operations whose reply tells no more than their success."""


def _method(
    operation: Callable[Arguments, Call], read: Callable[[Any], Result]
) -> Callable[Concatenate[SGLangServerClient, Arguments], Coroutine[Any, Any, Result]]:
    """A method that runs an operation and returns what `read` finds in the reply."""

    @wraps(operation)
    async def run(
        client: SGLangServerClient, /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        return read(await asyncio.wrap_future(client.submit(operation(*args, **kwargs))))

    return run


def _starter(
    operation: Callable[Arguments, Call],
) -> Callable[Concatenate[SGLangServerClient, Arguments], Future[Any]]:
    """A method that starts an operation and returns its future."""

    @wraps(operation)
    def start(
        client: SGLangServerClient, /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Any]:
        return client.submit(operation(*args, **kwargs))

    return start


class SGLangServerClient(_Client):
    """Asynchronous client; each method takes the arguments of the operation that it runs."""

    release_memory = _method(operations.release_memory, stage_costs_in)
    resume_memory = _method(operations.resume_memory, stage_costs_in)
    update_weights = _method(operations.update_weights, _nothing_in)
    start_update = _starter(operations.update_weights)
    update_from_distributed = _method(operations.update_from_distributed, _nothing_in)
    init_update_group = _method(operations.init_update_group, _nothing_in)
    destroy_update_group = _method(operations.destroy_update_group, _nothing_in)
    flush_cache = _method(operations.flush_cache, _nothing_in)
    pause_generation = _method(operations.pause_generation, _nothing_in)
    continue_generation = _method(operations.continue_generation, _nothing_in)
    server_info = _method(operations.server_info, dict[str, Any])
    model_info = _method(operations.model_info, dict[str, Any])
    health = _method(operations.health, _nothing_in)

    async def close(self) -> None:
        """Close the connections and end the client's thread; a later call starts both again."""
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class SyncSGLangServerClient(_Client):
    """Synchronous client: `client.run(operations.release_memory(["weights"]))`."""

    def run(self, call: Call) -> Any:
        """Run one operation to its end; returns the reply, decoded if it is JSON."""
        future = self.submit(call)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Close the connections and end the client's thread; a later call starts both again."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
