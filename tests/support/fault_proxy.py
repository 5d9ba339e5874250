"""An HTTP proxy in front of a real server that loses, holds, cuts and repeats what it is told to.

The trainer ranks are other processes: they plan the next fault with `POST /__faults__` and read
what passed with `GET /__seen__`. A fault concerns the n-th update request after it was planned.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, Literal

import aiohttp
import msgspec
from aiohttp import web

from support.sglang_server import free_port

UPDATES = ("/update_weights_from_tensor", "/update_weights_from_distributed")


class Fault(msgspec.Struct, frozen=True):
    """What happens to one update request.

    Attributes:
        kind: "lose": executed, then the connection is reset instead of a reply. "hold":
            executed, but the reply comes after `seconds`. "cut": both connections are closed
            after `seconds`, while the server executes. "twice": sent again after it was executed;
            the first reply goes back.
        nth: which update request, from 1.
    """

    kind: Literal["lose", "hold", "cut", "twice"]
    nth: int
    seconds: float = 0.0


def plan(url: str, fault: Fault | None) -> None:
    """Set the proxy's next fault and forget what was seen."""
    body = msgspec.json.encode(fault)
    request = urllib.request.Request(f"{url}/__faults__", body, method="POST")
    with urllib.request.urlopen(request, timeout=10):
        pass


def seen(url: str) -> list[dict[str, Any]]:
    """The update requests since the last plan: which fault, and the server's reply (`status`,
    `text`) where somebody waited for it.
    """
    with urllib.request.urlopen(f"{url}/__seen__", timeout=10) as reply:
        return json.loads(reply.read())  # type: ignore[no-any-return]


Rewrite = Callable[[str, bytes], bytes]
"""Takes the path and the body of a request, returns the body that goes on."""


@contextlib.contextmanager
def fault_proxy(target: str, rewrite: Rewrite = lambda _, body: body) -> Iterator[str]:
    """Run a proxy to the server `target` until the block ends; its URL."""
    proxy, started = _Proxy(target, rewrite), threading.Event()
    loop = asyncio.new_event_loop()
    stopped = asyncio.Event()

    async def serve() -> None:
        await proxy.start()
        started.set()
        await stopped.wait()
        await proxy.stop()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield proxy.url
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(20)
        loop.close()


class _Proxy:
    def __init__(self, target: str, rewrite: Rewrite) -> None:
        self._target = target
        self._rewrite = rewrite
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._fault: Fault | None = None
        self._num_updates = 0
        self._seen: list[dict[str, Any]] = []

    async def start(self) -> None:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_post("/__faults__", self._plan)
        application.router.add_get("/__seen__", self._report)
        application.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=False)
        await self._runner.setup()
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()

    async def stop(self) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def _plan(self, request: web.Request) -> web.Response:
        self._fault = msgspec.json.decode(await request.read(), type=Fault | None)
        self._num_updates, self._seen = 0, []
        return web.Response()

    async def _report(self, request: web.Request) -> web.Response:
        return web.json_response(self._seen)

    async def _forward(self, request: web.Request) -> web.Response:
        body = self._rewrite(request.path, await request.read())
        fault = None
        is_update = request.path in UPDATES and request.method == "POST"
        if is_update:
            self._num_updates += 1
            if self._fault is not None and self._fault.nth == self._num_updates:
                fault = self._fault
        kind = fault.kind if fault else None
        call = asyncio.ensure_future(self._send(request, body))
        if fault is not None and kind == "cut":
            await asyncio.sleep(fault.seconds)
            assert not call.done(), "the server was faster than the cut"
            call.cancel()  # closes the connection to the server
            self._seen.append({"fault": kind})
            return self._reset(request)
        reply, content = await call
        answers = [(reply, content)] if is_update else []
        if kind == "twice":
            answers.append(await self._send(request, body))
        for each, text in answers:
            self._seen.append({"fault": kind, "status": each.status, "text": text.decode()})
        if kind == "lose":
            return self._reset(request)
        if fault is not None and kind == "hold":
            await asyncio.sleep(fault.seconds)
        kept = {
            name: value for name, value in reply.headers.items() if name.lower() == "content-type"
        }
        return web.Response(
            status=reply.status, body=content, headers={**kept, "Connection": "close"}
        )

    async def _send(
        self, request: web.Request, body: bytes
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        headers = {
            k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length")
        }
        async with self._session.request(
            request.method, f"{self._target}{request.path_qs}", data=body, headers=headers
        ) as reply:
            return reply, await reply.read()

    @staticmethod
    def _reset(request: web.Request) -> web.Response:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()
