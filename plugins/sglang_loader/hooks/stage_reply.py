"""ASGI middleware: the replies to releases and resumes of memory carry what these cost.

SGLang's endpoints answer `null`. What the engine told of costs is left in the request's scope by
the hook that asked it, and becomes the body: `{"stages": {"weights": {"seconds": [...], ...}}}`,
see `stage_costs`. A refusal, and the reply to a request that there was nothing to do for, stay
as they are.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from sglang_loader.common.stage_costs import StageCosts

PATHS = ("/release_memory_occupation", "/resume_memory_occupation")
_SCOPE_KEY = "verl_sglang_sync.stage_costs"

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def install(app: Any) -> None:
    """Add the middleware to a Starlette application that does not serve yet; once."""
    if not any(entry.cls is StageReplyMiddleware for entry in app.user_middleware):
        app.add_middleware(StageReplyMiddleware)


def leave_costs(request: Any, costs: StageCosts) -> None:
    """Leave the costs for the reply to `request`; no-op where there is none, or no middleware."""
    scope = getattr(request, "scope", None)
    if scope is not None and costs:
        scope.get(_SCOPE_KEY, {}).update(costs)


class StageReplyMiddleware:
    """See the module."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith(PATHS):
            await self._app(scope, receive, send)
            return
        costs: StageCosts = {}
        scope[_SCOPE_KEY] = costs  # the same object, whoever copies the scope
        start: Message | None = None

        async def answer(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and message["status"] == 200:
                start = message  # its length is not known yet
                return
            if start is not None:
                first, start = start, None
                if costs and not message.get("more_body", False):
                    body = json.dumps({"stages": costs}).encode()
                    first = {**first, "headers": _with_length(first["headers"], len(body))}
                    message = {**message, "body": body}
                await send(first)
            await send(message)

        await self._app(scope, receive, answer)


def _with_length(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    kept = [(key, value) for key, value in headers if key.lower() != b"content-length"]
    return [*kept, (b"content-length", str(length).encode())]
