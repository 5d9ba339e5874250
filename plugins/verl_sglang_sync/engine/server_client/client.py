"""HTTP client of one server, with API keys, timeouts and retries.

Every operation either succeeds on the server or raises a `ServerError`. Retries:

- If no connection was made, any operation is tried `CONNECT_ATTEMPTS` times in all.
- If the connection broke, or no reply came in time, idempotent operations are tried `ATTEMPTS`
  times. Other operations may have been executed, and are not tried again.
- After a reply, good or bad, nothing is tried again.

So an operation whose server is silent ends within `ATTEMPTS` x its timeout, plus a few seconds for
the connections. Each operation has its own connection, and operations at a time their own threads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlencode, urlsplit

from sglang_loader.common.threads import in_kept_thread
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
MESSAGE_CHARS = 4000


@dataclass(eq=False, repr=False)
class SGLangServerClient:
    """A client of one server, which runs `operations`.

    Attributes:
        base_url: such as "http://10.0.0.1:30000" or "http://[::1]:30000".
        timeout_s: limit of the wait for a reply, or for its next part, in seconds.
        timeouts_s: other limits for some operations, by `http_settings.LIMITS`.
        admin_api_key: SGLang's `admin_api_key`, which its control endpoints need if it is set.
        rank: the trainer's rank, for errors.
        replica: the rollout replica, for errors.
    """

    base_url: str
    _: KW_ONLY
    timeout_s: float
    timeouts_s: Mapping[str, float] = field(default_factory=dict)
    api_key: str | None = None
    admin_api_key: str | None = None
    rank: int | None = None
    replica: int | None = None

    def submit(self, call: Call) -> Future[Any]:
        """Start one operation.

        Returns:
            The future of the reply, decoded if it is JSON, or of a `ServerError`. Cancelling the
            future only prevents retries.
        """
        # A trainer calls from short-lived event loops (`asyncio.run` for each stage), from a loop
        # that it blocks, and from threads without a loop. So no loop can be shared.
        return in_kept_thread(partial(self._send, call), "sglang-server-client")

    def run(self, call: Call) -> Any:
        """Run one operation. Return its reply, or raise a `ServerError`."""
        return self._send(call, Future())

    def _send(self, call: Call, future: Future[Any]) -> Any:
        num_refused = num_lost = 0
        while True:
            connection, is_open = self._connection(call.operation), False
            try:
                connection.connect()
                # Until here nothing has left, so that any operation may be tried again.
                is_open = True
                status, text = self._exchanged(call, connection)
                return self._result(call, status, text)
            except (OSError, HTTPException) as error:
                num_lost, num_refused = num_lost + is_open, num_refused + (not is_open)
                if num_refused == CONNECT_ATTEMPTS:
                    message = f"no connection in {num_refused} attempts: {error}"
                    raise self._error(ServerUnreachable, call, message) from None
                is_last = num_lost == ATTEMPTS or not call.operation.idempotent
                if future.cancelled() or (is_open and is_last):
                    raise self._lost(call, error, num_lost) from None
            finally:
                connection.close()
            time.sleep(RETRY_DELAY_S)

    def _connection(self, operation: Operation) -> HTTPConnection:
        url = urlsplit(self.base_url)
        assert url.hostname is not None, f"{self.base_url!r} names no server"
        kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
        limit_s = min(self._timeout_of(operation), CONNECT_TIMEOUT_S)
        return kind(url.hostname, url.port, timeout=limit_s)

    def _exchanged(self, call: Call, connection: HTTPConnection) -> tuple[int, str]:
        """Send a request, and wait for the reply: its status and body."""
        operation, headers, body = call.operation, {}, None
        key = self.admin_api_key or self.api_key if operation.admin else self.api_key
        if key:
            headers["Authorization"] = f"Bearer {key}"
        if call.payload is not None:
            body = json.dumps(call.payload).encode()
            headers["Content-Type"] = "application/json"
        query = f"?{urlencode(call.query)}" if call.query else ""
        # A connection is made within a shorter limit than a reply.
        connection.sock.settimeout(self._timeout_of(operation))
        path = urlsplit(self._url(operation)).path
        connection.request(operation.method, path + query, body, headers)
        # From here on the server may execute the operation.
        if call.sent is not None:
            call.sent.set()
        response = connection.getresponse()
        # Without a length, the end of a reply and a broken connection look the same.
        if response.length is None and not response.chunked:
            raise HTTPException("the reply does not say how long it is: it may be cut off")
        return response.status, response.read().decode(errors="replace")

    def _result(self, call: Call, status: int, text: str) -> Any:
        if status in (401, 403):
            which = "admin_api_key or api_key" if call.operation.admin else "api_key"
            message = f"the server refused the {which}: {text[:MESSAGE_CHARS]}"
            raise self._error(NotAuthorized, call, message, status)
        if status >= 300:
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
        return self.timeouts_s.get(operation.limit, self.timeout_s)

    def _url(self, operation: Operation) -> str:
        return f"{self.base_url.rstrip('/')}/{operation.path}"

    def _lost(self, call: Call, error: Exception, attempts: int) -> ServerError:
        times = "" if attempts == 1 else f", in {attempts} attempts"
        message = f"the connection broke{times}: {error!r}"
        if isinstance(error, TimeoutError):
            message = f"no reply within {self._timeout_of(call.operation):g} s{times}"
        # An idempotent operation ends only after the last attempt.
        if attempts < ATTEMPTS:
            message += ", not sent again, because it may have been executed"
        return self._error(ReplyLost, call, message)

    def _error(
        self, kind: type[ServerError], call: Call, message: str, status: int | None = None
    ) -> ServerError:
        return kind(
            message,
            endpoint=self._url(call.operation),
            status=status,
            rank=self.rank,
            replica=self.replica,
        )
