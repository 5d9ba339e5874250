"""The client of one server: its connections, API keys, timeouts, and what is sent again.

Every operation either succeeded on the server or raised a `ServerError`. Sent again is, after

- no connection: any operation, `CONNECT_ATTEMPTS` times; nothing was executed;
- no reply in time, or a broken connection: idempotent operations, `ATTEMPTS` times; others never,
  because they may have been executed;
- a reply, good or bad: nothing.

So an operation ends within `ATTEMPTS` x its timeout, plus a few seconds for the connections. These
belong to one event loop, but a trainer calls from many: from short-lived ones (`asyncio.run` for
each stage), from one that it blocks meanwhile, and from threads without one. So all clients of a
process share a loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any, Self

import aiohttp

from verl_sglang_sync.engine.server_client.errors import (
    NotAuthorized,
    ReplyLost,
    RequestFailed,
    ServerError,
    ServerUnreachable,
)
from verl_sglang_sync.engine.server_client.operations import Call, Operation

CONNECT_ATTEMPTS = 3
ATTEMPTS = 3
RETRY_DELAY_S = 1.0
CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
# Shorter than any server's: a connection is not used while its server is about to close it.
KEEP_ALIVE_S = 2.0
MESSAGE_CHARS = 4000


class SGLangServerClient:
    """Runs operations (see `operations`); keeps its connections open from call to call.

    Args:
        base_url: such as "http://10.0.0.1:30000" or "http://[::1]:30000".
        timeout_s: limit of one request, in seconds.
        timeouts_s: other limits for some operations, by `operations.LIMITS`.
        admin_api_key: SGLang's `admin_api_key`; its control endpoints want this one if it is set.
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
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._timeouts_s = dict(timeouts_s or {})
        self._api_key = api_key
        self._admin_api_key = admin_api_key
        self._rank = rank
        self._replica = replica
        self._calls: set[Future[Any]] = set()
        self._connections = _Connections()
        weakref.finalize(self, self._connections.close_soon)

    def submit(self, call: Call) -> Future[Any]:
        """Start one operation; the future gets its reply, decoded if it is JSON, or a `ServerError`
        of which the class says what happened. Cancelling the future cancels it.
        """
        future = asyncio.run_coroutine_threadsafe(self._send(call), _loop())
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    def run(self, call: Call) -> Any:
        """The reply of one operation, once it has succeeded; else `ServerError`."""
        future = self.submit(call)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel all calls and close the connections; a later call opens others."""
        for future in self._calls.copy():
            future.cancel()
        wait([self._connections.close_soon()], CLOSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _send(self, call: Call) -> Any:
        num_refused = num_lost = 0
        while True:
            try:
                return await self._attempt(call)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                num_refused += 1
                if num_refused == CONNECT_ATTEMPTS:
                    message = f"no connection in {num_refused} attempts: {error}"
                    raise self._error(ServerUnreachable, call, message) from None
            except (TimeoutError, aiohttp.ClientError) as error:
                num_lost += 1
                if num_lost == ATTEMPTS or not call.operation.idempotent:
                    raise self._lost(call, error, num_lost) from None
            await asyncio.sleep(RETRY_DELAY_S)

    async def _attempt(self, call: Call) -> Any:
        operation, timeout_s = call.operation, self._timeout_of(call.operation)
        headers, body = {}, None
        key = self._admin_api_key or self._api_key if operation.admin else self._api_key
        if key:
            headers["Authorization"] = f"Bearer {key}"
        if call.payload is not None:
            body = json.dumps(call.payload).encode()
            headers["Content-Type"] = "application/json"
        connect_s = min(timeout_s, CONNECT_TIMEOUT_S)
        async with self._connections.session().request(
            operation.method,
            self._url(operation),
            params=call.query,
            data=body,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s),
            trace_request_ctx=call.sent,
        ) as response:
            text = await response.text(errors="replace")
            if response.status >= 500:
                response.close()  # a server that failed closes the connection behind its reply
            return self._result(call, response.status, text)

    def _result(self, call: Call, status: int, text: str) -> Any:
        if status in (401, 403):
            which = "admin_api_key or api_key" if call.operation.admin else "api_key"
            message = f"the server refused the {which}: {text[:MESSAGE_CHARS]}"
            raise self._error(NotAuthorized, call, message, status)
        if status >= 400:
            raise self._error(RequestFailed, call, text[:MESSAGE_CHARS], status)
        try:
            content = json.loads(text)
        except ValueError:
            content = text
        success = content.get("success") if isinstance(content, dict) else None
        if success is False or (call.operation.confirmed and success is not True):
            raise self._error(RequestFailed, call, text[:MESSAGE_CHARS], status)
        return content

    def _timeout_of(self, operation: Operation) -> float:
        return self._timeouts_s.get(operation.limit, self._timeout_s)

    def _url(self, operation: Operation) -> str:
        return f"{self._base_url}/{operation.path}"

    def _lost(self, call: Call, error: Exception, attempts: int) -> ServerError:
        times = "" if attempts == 1 else f", in {attempts} attempts"
        message = f"the connection broke{times}: {error!r}"
        if isinstance(error, TimeoutError):
            message = f"no reply within {self._timeout_of(call.operation):g} s{times}"
        if attempts < ATTEMPTS:
            message += "; not sent again, because it may have been executed"
        return self._error(ReplyLost, call, message)

    def _error(
        self, kind: type[ServerError], call: Call, message: str, status: int | None = None
    ) -> ServerError:
        return kind(
            message,
            endpoint=self._url(call.operation),
            status=status,
            rank=self._rank,
            replica=self._replica,
        )


class _Connections:
    """aiohttp's session in the client's loop; it does not keep the client alive."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        """Opened with the first call, and with the first one after `close`."""
        if self._session is None:
            connector = aiohttp.TCPConnector(keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(
                connector=connector, trace_configs=[_setting_sent()]
            )
        return self._session

    def close_soon(self) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(self._close(), _loop())

    async def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _setting_sent() -> aiohttp.TraceConfig:
    """Makes a session set the event of a call when its body has been written."""

    async def chunk_sent(_: Any, context: Any, __: Any) -> None:
        if context.trace_request_ctx is not None:  # called just before the write
            asyncio.get_running_loop().call_soon(context.trace_request_ctx.set)

    config = aiohttp.TraceConfig()
    config.on_request_chunk_sent.append(chunk_sent)
    return config


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Of all clients of this process; its thread ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="sglang-server-client", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=_loop.cache_clear)  # the thread stays with the parent
