"""Routers for the tests: SGLang's own where it is installed, and one of ours that talks alike.

Ours answers as sglang-router 0.1.4, 0.2.2 and 0.3.2 were seen to answer, and writes down what it
was asked. As a process it serves the newest dialect:

    python -m support.router ::1 23456
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

from support.forks import TESTS, die_with_parent
from verl_sglang_sync.engine.server_client.operations import server_url

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
async def serving(router: Router, host: str = "127.0.0.1") -> AsyncIterator[Router]:
    runner = web.AppRunner(router.application())
    await runner.setup()
    await web.TCPSite(runner, host, 0, shutdown_timeout=0.1).start()
    try:
        router.url = server_url(host, runner.addresses[0][1])
        yield router
    finally:
        await runner.cleanup()


def is_installed() -> bool:
    """Is SGLang's own router there? It is no dependency of ours."""
    return importlib.util.find_spec("sglang_router") is not None


@contextlib.contextmanager
def router_process(
    folder: Path, host: str, port: int, *, real: bool, prefix: Sequence[str] = ()
) -> Iterator[str]:
    """Run a router as a process, SGLang's own if `real`; its URL."""
    command = [sys.executable, "-m", "support.router", host, str(port)]
    if real:
        listens_at = f"[{host}]" if ":" in host else host
        command[2:] = ["sglang_router.launch_router", "--host", listens_at, "--port", str(port)]
        command += ["--prometheus-port", str(port + 1), "--worker-startup-check-interval", "1"]
    path = os.pathsep.join([TESTS, *filter(None, sys.path)])
    with (folder / "router.log").open("wb") as log:
        process = subprocess.Popen(
            [*prefix, *command],
            env={**os.environ, "PYTHONPATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )
    try:
        yield server_url(host, port)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_up(url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/liveness", timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def workers_of(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/workers", timeout=10) as reply:
        return [worker["url"] for worker in json.loads(reply.read())["workers"]]


if __name__ == "__main__":

    async def _serve() -> None:
        runner = web.AppRunner(Router().application())
        await runner.setup()
        await web.TCPSite(runner, sys.argv[1], int(sys.argv[2])).start()
        await asyncio.Event().wait()

    asyncio.run(_serve())
