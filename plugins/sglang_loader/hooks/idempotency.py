"""ASGI middleware: an update request with an `Idempotency-Key` runs at most once, and in order.

Installed in the process that serves HTTP. A request without the header passes untouched. With it:

- the next request of its sync runs to its end, even if the client is gone meanwhile;
- a repetition waits for the first and gets the same reply, with `Idempotency-Replayed: true`;
- 409: out of order, of an older sync, or after a failure; 422: the body differs from the first's;
- `OPTIONS` with the header: 204 with `Idempotency-Supported`, as a client asks for it.

Bodies are hashed as they pass; none is kept. A request counts from its last byte on: one whose
body never came whole has not happened.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from sglang_loader.common.update_keys import (
    KEY_HEADER,
    KEYED_PATHS,
    REPLAYED_HEADER,
    SUPPORTED_HEADER,
    UpdateKey,
)
from sglang_loader.hooks.update_record import KeyConflict, Reply, UpdateEntry, UpdateRecord

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def install(app: Any) -> None:
    """Add the middleware to a Starlette application that does not serve yet; once."""
    if not any(entry.cls is IdempotencyMiddleware for entry in app.user_middleware):
        app.add_middleware(IdempotencyMiddleware)


class IdempotencyMiddleware:
    """See the module; one instance serves one application, in one event loop."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._record = UpdateRecord()
        self._running: set[asyncio.Task[None]] = set()  # asyncio itself keeps weak references

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        header = _key_of(scope)
        if header is None:
            await self._app(scope, receive, send)
            return
        if scope["method"] == "OPTIONS":
            await _reply(send, Reply(204, ((b"allow", b"POST"),), b""))
            return
        body = _Body(receive)
        try:
            await self._serve(UpdateKey.parse(header), body, scope, send)
        except (ValueError, KeyConflict) as error:
            await body.drain()
            await _reply(send, _refusal(400 if isinstance(error, ValueError) else 409, str(error)))

    async def _serve(self, key: UpdateKey, body: _Body, scope: Scope, send: Send) -> None:
        if self._record.find(key) is None:
            run = await self._run(key, body, scope)
            if run.entry is not None or not body.is_complete:
                await body.drain()
                if run.reply is not None:
                    await _reply(send, run.reply)
                return
        await body.drain()
        entry = self._record.find(key)
        if entry is None or not body.is_complete:
            return  # the client went away
        if entry.digest != body.digest:
            message = f"update {key.sequence} of sync {key.sync_id} came before with another body"
            await _reply(send, _refusal(422, message))
            return
        logger.info("update %d of sync %s came again: not repeated", key.sequence, key.sync_id)
        await entry.finished.wait()
        assert entry.reply is not None, "set together"
        await _reply(send, entry.reply, replayed=True)

    async def _run(self, key: UpdateKey, body: _Body, scope: Scope) -> _Run:
        """Through the application, in a task that nobody cancels."""
        run = _Run(self._app, self._record, key, body)
        task = asyncio.create_task(run.to_its_end(scope))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.shield(task)
        return run


class _Run:
    """The first request with its key, through the application.

    Attributes:
        entry: its entry in the record; None if its body never came whole, or another request
            with the same key was faster.
        reply: what the application answered; None if nothing.
    """

    def __init__(self, app: App, record: UpdateRecord, key: UpdateKey, body: _Body) -> None:
        self.entry: UpdateEntry | None = None
        self.reply: Reply | None = None
        self._app = app
        self._record = record
        self._key = key
        self._body = body
        self._start: Message = {}
        self._content = bytearray()

    async def to_its_end(self, scope: Scope) -> None:
        """Run the application; the entry is finished whatever happens."""
        try:
            await self._app(scope, self._receive, self._send)
            if self._start:
                headers = tuple(self._start.get("headers", ()))
                self.reply = Reply(self._start["status"], headers, bytes(self._content))
        finally:
            if self.entry is not None:
                self.entry.finish(self.reply or _refusal(500, "the update raised an exception"))

    async def _receive(self) -> Message:
        """The body's next part; the last one only if the request may run now."""
        if self._body.is_complete:
            await asyncio.Event().wait()  # the client may leave; the update goes on
        message = await self._body.next()
        if self._body.is_complete:
            try:
                if self._record.find(self._key) is not None:
                    return {"type": "http.disconnect"}
            except KeyConflict:
                return {"type": "http.disconnect"}
            self.entry = self._record.begin(self._key, self._body.digest)
        return message

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            self._content += message.get("body", b"")


class _Body:
    """A request's body: hashed, never kept.

    Attributes:
        is_complete: the last part has come.
    """

    def __init__(self, receive: Receive) -> None:
        self.is_complete = False
        self._receive = receive
        self._is_broken = False
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> bytes:
        """Of what has come so far."""
        return self._hash.digest()

    async def next(self) -> Message:
        """The next part, or that the client is gone."""
        message = await self._receive()
        if message["type"] == "http.request":
            self._hash.update(message.get("body", b""))
            self.is_complete = not message.get("more_body", False)
        else:
            self._is_broken = True
        return message

    async def drain(self) -> None:
        """Take what is still to come, or the client would not read the reply."""
        while not self.is_complete and not self._is_broken:
            await self.next()


def _key_of(scope: Scope) -> str | None:
    """The key's header, where it means something."""
    if scope["type"] != "http" or not scope["path"].endswith(KEYED_PATHS):
        return None
    name = KEY_HEADER.lower().encode()
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def _refusal(status: int, message: str) -> Reply:
    """As SGLang words a failed update."""
    body = json.dumps({"success": False, "message": message}).encode()
    headers = (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())
    return Reply(status, headers, body)


async def _reply(send: Send, reply: Reply, *, replayed: bool = False) -> None:
    headers = [
        *reply.headers,
        (SUPPORTED_HEADER.lower().encode(), b"true"),
        (REPLAYED_HEADER.lower().encode(), b"true" if replayed else b"false"),
    ]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
