"""Client of SGLang's router, which adds a server to the router's workers, and removes it.

    router = RouterClient("http://10.0.0.9:30000", timeout_s=600)
    worker = router.add("http://[fd00::1]:30000")
    ...
    router.remove(worker)

Routers in use have one of three protocols. The client finds out which one.

- sglang-router 0.3: `POST /workers` queues the server under a UUID. `GET /workers/{id}` reports the
  state of the queued job. `DELETE /workers/{id}` queues the removal.
- sglang-router 0.2: the same, but the id is the server's URL.
- sglang-router 0.1: `POST /add_worker?url=...` answers when the server is healthy.
  `POST /remove_worker?url=...` removes the server.
"""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

import msgspec

from verl_sglang_sync.engine.server_client.client import SGLangServerClient
from verl_sglang_sync.engine.server_client.errors import (
    NotAuthorized,
    RequestFailed,
    RouterError,
    ServerError,
)
from verl_sglang_sync.engine.server_client.operations import Call, Operation
from verl_sglang_sync.http_settings import KEY_VARIABLE

POLL_S = 0.25
NO_SUCH_ROUTE = (404, 405)


class Worker(msgspec.Struct, frozen=True):
    """A server among a router's workers.

    Attributes:
        id: the router's name of the server, or None for a router of version 0.1.
    """

    url: str
    id: str | None


class RouterClient:
    """Client of one router.

    Args:
        timeout_s: limit for a request, and for the wait until a server is healthy.
        api_key: the router's own key.
    """

    def __init__(self, url: str, *, timeout_s: float, api_key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._client = SGLangServerClient(self._url, timeout_s=timeout_s, api_key=api_key)

    def add(self, url: str, *, api_key: str | None = None) -> Worker:
        """Add a server to the workers, and wait until the router sends requests to it.

        Args:
            url: the server's address as the router reaches it. The server may be a worker already.
            api_key: the server's key, which the router must send.

        Raises:
            RouterError: the router did not add the server. The error has the router, the endpoint,
                the status and the router's message.
        """
        payload = {"url": url} | ({} if api_key is None else {"api_key": api_key})
        try:
            try:
                reply = self._client.run(Call(_operation("workers"), payload))
            except RequestFailed as error:
                if error.status not in NO_SUCH_ROUTE:
                    raise
                return self._add_by_query(payload)
            worker_id = reply.get("worker_id") if isinstance(reply, dict) else None
            worker = Worker(url, worker_id or url)
            self._wait_until_healthy(worker)
        except ServerError as error:
            raise self._named(f"did not add the server {url}", error) from error
        return worker

    def remove(self, worker: Worker) -> None:
        """Remove a server, if it is still among the workers.

        Raises:
            RouterError: the router did not remove the server.
        """
        try:
            if worker.id is None:
                self._client.run(Call(_operation("remove_worker"), query={"url": worker.url}))
            else:
                self._client.run(Call(_operation(_path(worker.id), "DELETE")))
        except ServerError as error:
            if error.status != 404:  # 404: the server is no worker any more
                raise self._named(f"did not remove the server {worker.url}", error) from error

    def _add_by_query(self, query: dict[str, str]) -> Worker:
        """Add a server by the protocol of version 0.1."""
        # This protocol refuses a URL that is among the workers.
        self._client.run(Call(_operation("remove_worker"), query={"url": query["url"]}))
        self._client.run(Call(_operation("add_worker"), query=query))
        return Worker(query["url"], None)

    def _wait_until_healthy(self, worker: Worker) -> None:
        assert worker.id is not None
        look_up = _operation(_path(worker.id), "GET")
        deadline = time.monotonic() + self._timeout_s
        while True:
            state = self._look_up(look_up)
            if state.get("is_healthy"):
                return
            job = state.get("job_status") or {}
            reason = None
            # The job also fails if the server was a worker before, which does no harm.
            if job.get("status") == "failed" and not self._has(worker.url):
                reason = str(job.get("message"))
            elif time.monotonic() > deadline:
                reason = f"not healthy within {self._timeout_s:g} s. The router's report: {state}"
            if reason is not None:
                raise RouterError(reason, endpoint=f"{self._url}/{look_up.path}", status=200)
            time.sleep(POLL_S)

    def _look_up(self, operation: Operation) -> dict[str, Any]:
        """Return the router's report on a worker. Empty before its job has begun."""
        try:
            reply = self._client.run(Call(operation))
        except RequestFailed as error:
            if error.status == 404:
                return {}
            raise
        return reply if isinstance(reply, dict) else {}

    def _has(self, url: str) -> bool:
        """Return True if the server is among the workers."""
        reply = self._client.run(Call(_operation("workers", "GET")))
        return url in [worker.get("url") for worker in reply.get("workers", ())]

    def _named(self, failure: str, error: ServerError) -> RouterError:
        """Make the error that names the router, such as "the router URL did not add ..."."""
        hint = f" (see {KEY_VARIABLE})" if isinstance(error, NotAuthorized) else ""
        return RouterError(
            f"the router {self._url} {failure}: {error.message}{hint}",
            endpoint=error.endpoint,
            status=error.status,
        )


def _operation(path: str, method: Any = "POST") -> Operation:
    return Operation(path, method, limit="info", idempotent=True, admin=False)


def _path(worker_id: str) -> str:
    return f"workers/{quote(worker_id, safe='')}"
