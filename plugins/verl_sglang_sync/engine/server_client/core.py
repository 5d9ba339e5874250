"""Sends calls to one server: connections, API keys, timeouts, retries. All clients use it.

What is sent again, and how often:

- no connection: any operation, `CONNECT_ATTEMPTS` times; nothing was executed;
- no reply in time, or a broken connection: idempotent operations, `ATTEMPTS` times; others never,
  because they may have been executed;
- a reply, good or bad: never.

So an operation ends within `ATTEMPTS` x its timeout, plus a few seconds for the connections.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from verl_sglang_sync.engine.server_client.errors import (
    ConnectionBroken,
    NoReply,
    NotAuthorized,
    RequestFailed,
    ServerError,
    ServerUnreachable,
)
from verl_sglang_sync.engine.server_client.operations import Call, Operation

CONNECT_ATTEMPTS = 3
ATTEMPTS = 3
RETRY_DELAY_S = 1.0
CONNECT_TIMEOUT_S = 10.0
# Shorter than any server's: a connection is not used while its server is about to close it.
KEEP_ALIVE_S = 2.0
MESSAGE_CHARS = 4000


@dataclass(frozen=True, kw_only=True)
class ServerAccess:
    """How to reach one server.

    Attributes:
        base_url: such as "http://10.0.0.1:30000" or "http://[::1]:30000".
        timeout_s: limit of one request, in seconds.
        timeouts_s: other limits for some operations, by `operations.LIMITS`.
        api_key: SGLang's `api_key`.
        admin_api_key: SGLang's `admin_api_key`; its control endpoints want this one if it is set.
        rank: the trainer's rank, for errors.
        replica: the rollout replica, for errors.
    """

    base_url: str
    timeout_s: float
    timeouts_s: Mapping[str, float] = field(default_factory=dict)
    api_key: str | None = None
    admin_api_key: str | None = None
    rank: int | None = None
    replica: int | None = None

    def timeout_of(self, operation: Operation) -> float:
        """Seconds that one attempt may take."""
        return self.timeouts_s.get(operation.limit, self.timeout_s)

    def key_for(self, operation: Operation) -> str | None:
        """The bearer token that SGLang wants for this endpoint."""
        if operation.admin:
            return self.admin_api_key or self.api_key
        return self.api_key


class ServerCore:
    """Runs calls; all methods belong to one event loop.

    Args:
        access: the server.
    """

    def __init__(self, access: ServerAccess) -> None:
        self._access = access
        self._session: aiohttp.ClientSession | None = None

    async def send(self, call: Call) -> Any:
        """Run an operation to its end; returns the reply, decoded if it is JSON.

        Raises:
            ServerError: it did not succeed; the class says how, see `errors`.
        """
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

    async def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _attempt(self, call: Call) -> Any:
        operation, headers = call.operation, self._headers(call)
        body = None
        if call.payload is not None:
            body = json.dumps(call.payload).encode()
            headers["Content-Type"] = "application/json"
        async with self._open_session().request(
            operation.method,
            self._url(operation),
            params=call.query,
            data=body,
            headers=headers,
            timeout=_timeout(self._access.timeout_of(operation)),
            trace_request_ctx=call.sent,
        ) as response:
            text = await response.text(errors="replace")
            if response.status >= 500:
                response.close()  # a server that failed closes the connection behind its reply
            return self._result(call, response.status, text)

    def _result(self, call: Call, status: int, text: str) -> Any:
        """The reply's content, if it tells of success."""
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

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(
                connector=connector, trace_configs=[_setting_sent()]
            )
        return self._session

    def _headers(self, call: Call) -> dict[str, str]:
        headers = {}
        if token := self._access.key_for(call.operation):
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _url(self, operation: Operation) -> str:
        return f"{self._access.base_url}/{operation.path}"

    def _lost(self, call: Call, error: Exception, attempts: int) -> ServerError:
        times = "" if attempts == 1 else f", in {attempts} attempts"
        kind: type[ServerError]
        if isinstance(error, TimeoutError):
            kind = NoReply
            message = f"no reply within {self._access.timeout_of(call.operation):g} s{times}"
        else:
            kind, message = ConnectionBroken, f"the connection broke{times}: {error!r}"
        if attempts < ATTEMPTS:
            message += "; not sent again, because it may have been executed"
        return self._error(kind, call, message)

    def _error(
        self, kind: type[ServerError], call: Call, message: str, status: int | None = None
    ) -> ServerError:
        return kind(
            message,
            endpoint=self._url(call.operation),
            status=status,
            rank=self._access.rank,
            replica=self._access.replica,
        )


def _setting_sent() -> aiohttp.TraceConfig:
    """Makes a session set the event of a call when its body has been written."""

    async def chunk_sent(_: Any, context: Any, __: Any) -> None:
        if context.trace_request_ctx is not None:  # called just before the write
            asyncio.get_running_loop().call_soon(context.trace_request_ctx.set)

    config = aiohttp.TraceConfig()
    config.on_request_chunk_sent.append(chunk_sent)
    return config


def _timeout(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, CONNECT_TIMEOUT_S))
