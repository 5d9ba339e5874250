"""The clients of one SGLang server: what they share, then the asynchronous and the synchronous one.

Every operation either succeeded on the server or raised a `ServerError`. Both clients may be used
from any thread and any event loop, and keep their connections open from call to call.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from sglang_loader.manifest_verdict import ManifestVerdict, decode_verdicts
from sglang_loader.stage_costs import StageCosts, stage_costs_in
from sglang_loader.update_keys import UpdateKey
from verl_sglang_sync.server_client import operations
from verl_sglang_sync.server_client.core import ServerAccess, ServerCore
from verl_sglang_sync.server_client.loop_thread import LoopThread
from verl_sglang_sync.server_client.operations import Call

CLOSE_TIMEOUT_S = 5.0


class _Client:
    """What both clients are made of.

    Args:
        base_url: such as "http://10.0.0.1:30000" or "http://[::1]:30000".
        timeout_s: limit of one request, in seconds.
        timeouts_s: limits of some operations, by `operations.LIMITS`.
        api_key: SGLang's `api_key`.
        admin_api_key: SGLang's `admin_api_key`.
        rank: the trainer's rank, for errors.
        replica: the rollout replica, for errors.
    """

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

    def _submit(self, call: Call) -> Future[Any]:
        return self._loop.submit(self._core.send(call))

    def _close(self) -> None:
        """Close the connections and end the thread; a later call starts both again."""
        if thread := self._loop.stop():
            thread.join(CLOSE_TIMEOUT_S)


def verdicts_of(reply: Any) -> list[ManifestVerdict]:
    """What an engine's reply to `check_manifest` says.

    Raises:
        ManifestError: something else.
    """
    return decode_verdicts(str(reply.get("message")))


class SGLangServerClient(_Client):
    """Asynchronous client; arguments as `_Client`, operations as in `operations`."""

    async def release_memory(self, tags: Sequence[str]) -> StageCosts:
        """See `operations.release_memory`; returns what it cost."""
        return stage_costs_in(await self._send(operations.release_memory(tags)))

    async def resume_memory(self, tags: Sequence[str]) -> StageCosts:
        """See `operations.resume_memory`; returns what it cost."""
        return stage_costs_in(await self._send(operations.resume_memory(tags)))

    async def update_weights(
        self,
        handles: Sequence[bytes],
        *,
        load_format: str,
        flush_cache: bool = False,
        weight_version: str | None = None,
        key: UpdateKey | None = None,
    ) -> None:
        """See `operations.update_weights`."""
        await asyncio.wrap_future(
            self.start_update(
                handles,
                load_format=load_format,
                flush_cache=flush_cache,
                weight_version=weight_version,
                key=key,
            )
        )

    def start_update(
        self,
        handles: Sequence[bytes],
        *,
        load_format: str,
        flush_cache: bool = False,
        weight_version: str | None = None,
        key: UpdateKey | None = None,
        sent: threading.Event | None = None,
    ) -> Future[None]:
        """See `operations.update_weights`; for callers that go on meanwhile.

        A caller that goes on computing holds Python's lock, and with it this client's thread: it
        may wait for `sent`, which is set when the request has left.
        """
        call = operations.update_weights(
            handles,
            load_format=load_format,
            flush_cache=flush_cache,
            weight_version=weight_version,
            key=key,
        )
        return self._submit(replace(call, sent=sent))

    async def check_manifest(self, encoded: bytes) -> list[ManifestVerdict]:
        """See `operations.check_manifest`; one verdict of each data-parallel rank."""
        return verdicts_of(await self._send(operations.check_manifest(encoded)))

    async def update_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        load_format: str | None = None,
        flush_cache: bool = False,
        weight_version: str | None = None,
        key: UpdateKey | None = None,
    ) -> None:
        """See `operations.update_from_distributed`."""
        await self._send(
            operations.update_from_distributed(
                names,
                dtypes,
                shapes,
                group_name=group_name,
                load_format=load_format,
                flush_cache=flush_cache,
                weight_version=weight_version,
                key=key,
            )
        )

    async def init_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        """See `operations.init_update_group`."""
        await self._send(
            operations.init_update_group(
                master_address=master_address,
                master_port=master_port,
                rank_offset=rank_offset,
                world_size=world_size,
                group_name=group_name,
                backend=backend,
            )
        )

    async def destroy_update_group(self, group_name: str) -> None:
        """See `operations.destroy_update_group`."""
        await self._send(operations.destroy_update_group(group_name))

    async def flush_cache(self) -> None:
        """See `operations.flush_cache`."""
        await self._send(operations.flush_cache())

    async def pause_generation(self, mode: str = "abort") -> None:
        """See `operations.pause_generation`."""
        await self._send(operations.pause_generation(mode))

    async def continue_generation(self) -> None:
        """See `operations.continue_generation`."""
        await self._send(operations.continue_generation())

    async def server_info(self) -> dict[str, Any]:
        """See `operations.server_info`."""
        return dict(await self._send(operations.server_info()))

    async def model_info(self) -> dict[str, Any]:
        """See `operations.model_info`."""
        return dict(await self._send(operations.model_info()))

    async def health(self) -> None:
        """See `operations.health`."""
        await self._send(operations.health())

    async def close(self) -> None:
        """Close the connections and end the client's thread."""
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _send(self, call: Call) -> Any:
        return await asyncio.wrap_future(self._submit(call))


class SyncSGLangServerClient(_Client):
    """Synchronous client; arguments as `_Client`.

    client.run(operations.release_memory(["weights"]))
    """

    def submit(self, call: Call) -> Future[Any]:
        """Start one operation; cancelling the future cancels it."""
        return self._submit(call)

    def run(self, call: Call) -> Any:
        """Run one operation to its end; returns the reply, decoded if it is JSON."""
        future = self._submit(call)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Close the connections and end the client's thread."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
