"""A router that answers as sglang-router 0.1.4, 0.2.2 and 0.3.2 were seen to answer, and writes
down what it was asked.
"""

import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

from support.remote import Remote, finish, results_of
from verl_sglang_sync.http_settings import server_url

Dialect = Literal["0.1", "0.2", "0.3"]
START_TIMEOUT_S = 60


class Router:
    """One router.

    Args:
        dialect: of which release.
        api_key: what it wants as a bearer token.
        num_polls: how often a queued job is looked up before it is done.
        failure: message with which every job fails.
    """

    def __init__(
        self,
        dialect: Dialect = "0.3",
        *,
        api_key: str | None = None,
        num_polls: int = 1,
        failure: str | None = None,
    ) -> None:
        self.dialect = dialect
        self.api_key = api_key
        self.num_polls = num_polls
        self.failure = failure
        self.workers: dict[str, str] = {}  # URL by id
        self.calls: list[tuple[str, str, Any]] = []  # method, path with query, payload
        self.url = ""
        self._jobs: dict[str, dict[str, Any]] = {}
        self.stack: Any = None

    def application(self) -> web.Application:
        routes = [web.get("/liveness", self._live)]
        if self.dialect == "0.1":
            routes += [web.post("/add_worker", self._add), web.post("/remove_worker", self._drop)]
        else:
            routes += [
                web.post("/workers", self._queue),
                web.get("/workers", self._list),
                web.get("/workers/{id}", self._look_up),
                web.delete("/workers/{id}", self._delete),
            ]
        application = web.Application(middlewares=[self._record])
        application.add_routes(routes)
        return application

    @web.middleware
    async def _record(self, request: web.Request, handler: Any) -> web.StreamResponse:
        payload = await request.json() if request.can_read_body else None
        self.calls.append((request.method, request.path_qs, payload))
        wanted = None if self.api_key is None else f"Bearer {self.api_key}"
        if wanted is not None and request.headers.get("Authorization") != wanted:
            return web.Response(status=401)
        return await handler(request)  # type: ignore[no-any-return]

    async def _live(self, request: web.Request) -> web.Response:
        return web.Response(text="OK")

    # 0.1

    async def _add(self, request: web.Request) -> web.Response:
        url = request.query["url"]
        if self.failure is not None:
            return web.Response(status=400, text=self.failure)
        if url in self.workers:
            return web.Response(status=400, text=f"Worker {url} already exists")
        self.workers[url] = url
        return web.Response(text=f"Successfully added worker: {url}")

    async def _drop(self, request: web.Request) -> web.Response:
        url = request.query["url"]
        self.workers.pop(url, None)
        return web.Response(text=f"Successfully removed worker: {url}")

    # 0.2 and 0.3

    async def _queue(self, request: web.Request) -> web.Response:
        url = (await request.json())["url"]
        known = [name for name, worker in self.workers.items() if worker == url]
        name = known[0] if known else url if self.dialect == "0.2" else str(uuid.uuid4())
        failure = f"Worker {url} already exists" if known else self.failure
        self._jobs[name] = {"url": url, "polls": self.num_polls, "failure": failure}
        return web.json_response({"status": "accepted", "worker_id": name}, status=202)

    async def _list(self, request: web.Request) -> web.Response:
        workers = [{"id": name, "url": url} for name, url in self.workers.items()]
        return web.json_response({"workers": workers, "total": len(workers)})

    async def _look_up(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        job = self._jobs.get(name)
        if job is None:
            return web.json_response({"error": f"Worker {name} not found"}, status=404)
        status, job["polls"] = "processing", job["polls"] - 1
        if job["polls"] < 0:
            status = "failed" if job["failure"] else "done"
            if not job["failure"]:
                self.workers[name] = job["url"]
        answer: dict[str, Any] = {"id": name, "is_healthy": name in self.workers}
        if status != "done":
            answer["job_status"] = {"status": status, "message": job["failure"]}
        return web.json_response(answer)

    async def _delete(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if self.workers.pop(name, None) is None:
            return web.json_response({"error": f"Worker {name} not found"}, status=404)
        return web.json_response({"status": "accepted", "worker_id": name}, status=202)


@contextlib.asynccontextmanager
async def serving(router: Any, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Any]:
    """Serve the application of a router, or of anything that has one, and tell it its `url`."""
    runner = web.AppRunner(router.application())
    await runner.setup()
    await web.TCPSite(runner, host, port, shutdown_timeout=0.1).start()
    try:
        router.url = server_url(host, runner.addresses[0][1])
        yield router
    finally:
        await runner.cleanup()


class RouterProcess:
    """A router of the newest dialect as a process, on another host where `prefix` says so."""

    def __init__(self, log: Path, host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> None:
        self._process = Remote(
            partial(_started, host), environment=os.environ, log=log, command=prefix
        )
        results_of(finish([self._process], START_TIMEOUT_S))
        self.url = self._ask("url")

    def workers(self) -> list[str]:
        """URLs of the servers that have joined."""
        return list(self._ask("workers").values())

    def end(self) -> None:
        self._process.end()

    def _ask(self, name: str) -> Any:
        self._process.begin(getattr, name)
        return results_of(finish([self._process], START_TIMEOUT_S))[0]


async def _started(host: str) -> Router:
    router, stack = Router(), contextlib.AsyncExitStack()
    router.stack = stack  # what is forgotten would be closed
    return await stack.enter_async_context(serving(router, host))
