"""What the hooks do in the process that serves HTTP.

Replies to releases and resumes of memory say what these cost, or why they were refused. A request
that waits at the schedulers' gate does not block the sync that it waits for (`UpdateLock`), and an
engine that winds up its last requests is asked again (`ask_until_idle`).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from sglang_loader.common.stage_costs import StageCosts, joined
from sglang_loader.upstream import is_ours, told

HTTP_SERVER = "sglang.srt.entrypoints.http_server"
BUSY_WAIT_S = 5.0
BUSY_POLL_S = 0.005

_SCOPE_KEY = "verl_sglang_sync.stage_costs"

Original = Callable[..., Any]


class MemoryRequestRefused(RuntimeError):
    """The engine lives and did nothing; the message says what it was asked and why not."""


def launch_with_middleware(original: Original, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `Engine._launch_subprocesses`: replies tell what stages cost.

    An engine without HTTP has not imported the module of the server. The middleware must come
    before SGLang's own check of API keys, which it adds after this, on the outside.
    """
    arguments = kwargs["server_args"] if "server_args" in kwargs else args[0]
    if is_ours(arguments) and HTTP_SERVER in sys.modules:
        app = sys.modules[HTTP_SERVER].app
        if not any(entry.cls is StageReplyMiddleware for entry in app.user_middleware):
            app.add_middleware(StageReplyMiddleware)
    return original(cls, *args, **kwargs)


def _costs_or_raise(stage: str) -> Callable[..., Awaitable[StageCosts | None]]:
    """AROUND this method of `TokenizerControlMixin`: as the original, but for what the stage cost;
    the reply to `request` carries that too. MemoryRequestRefused is raised with what the engine
    refused, and why.
    """

    async def hook(
        original: Original, manager: Any, obj: Any, request: Any = None
    ) -> StageCosts | None:
        if not is_ours(manager.server_args):
            await original(manager, obj, request)
            return None
        manager.auto_create_handle_loop()
        replies = await ask_until_idle(manager, getattr(manager, f"{stage}_communicator"), obj)
        if refusals := [told(reply)["refusal"] for reply in replies if "refusal" in told(reply)]:
            raise MemoryRequestRefused("\n".join(refusals))
        costs = joined([told(reply).get("costs", {}) for reply in replies])
        # There may be no request, or no middleware.
        getattr(request, "scope", {}).get(_SCOPE_KEY, {}).update(costs)
        return costs

    return hook


RELEASE, RESUME = "release_memory_occupation", "resume_memory_occupation"
release_or_raise, resume_or_raise = _costs_or_raise(RELEASE), _costs_or_raise(RESUME)


class UpdateLock:
    """Stands in for SGLang's lock between requests and updates: open while the gate is closed.

    A request holds the lock until it is answered, and an update waits for it. One that waits at
    the gate would keep the update from coming that it waits for. Nothing else runs then: the gate
    closes only while the engine is idle. `is_closed`: the engine's last word on its gate.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.is_closed = False

    @property
    def writer_lock(self) -> AbstractAsyncContextManager[Any]:
        """What an update enters."""
        if self.is_closed:
            return nullcontext()
        lock: AbstractAsyncContextManager[Any] = self._lock.writer_lock
        return lock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def update_lock_of(manager: Any) -> UpdateLock:
    """The lock of a tokenizer manager, which it gets with the first use."""
    if not isinstance(manager.model_update_lock, UpdateLock):
        manager.model_update_lock = UpdateLock(manager.model_update_lock)
    lock: UpdateLock = manager.model_update_lock
    return lock


def note_gate(manager: Any, replies: Sequence[Any]) -> None:
    """Take over what the engine's replies say of its gate, where they say anything."""
    if reasons := [told(reply)["closed"] for reply in replies if "closed" in told(reply)]:
        update_lock_of(manager).is_closed = any(reasons)


async def ask_until_idle(
    manager: Any, communicator: Callable[[Any], Awaitable[Iterable[Any]]], request: Any
) -> list[Any]:
    """Have the engine execute a request, and again while it is busy, `BUSY_WAIT_S` at most; its
    last replies. They may say whether its gate is closed; where nothing was to be done they do not.

    Requests that are answered may not be wound up yet in the scheduler, which then refuses before
    it touches anything (`is_busy`). No new ones come meanwhile to an update: whoever makes it holds
    the writer lock, or generation is paused.
    """
    deadline = time.monotonic() + BUSY_WAIT_S
    while True:
        replies = list(await communicator(request))
        is_busy = any(told(reply).get("is_busy") for reply in replies)
        if not is_busy or time.monotonic() > deadline:
            note_gate(manager, replies)
            return replies
        await asyncio.sleep(BUSY_POLL_S)


async def update(original: Original, manager: Any, obj: Any, request: Any = None) -> Any:
    """AROUND `TokenizerControlMixin.update_weights_from_tensor`."""
    if is_ours(manager.server_args):
        communicator = manager.update_weights_from_tensor_communicator
        if not isinstance(communicator, partial):  # ours, once
            patient = partial(ask_until_idle, manager, communicator)
            manager.update_weights_from_tensor_communicator = patient
        update_lock_of(manager)
    return await original(manager, obj, request)


class StageReplyMiddleware(BaseHTTPMiddleware):
    """SGLang's endpoints answer `null`. What the engine told of costs is left in the request's
    scope by the hook that asked it, and becomes the body: `{"stages": {"weights": {"seconds":
    [...]}}}`, see `stage_costs`. A refusal, and the reply to a request that there was nothing to do
    for, stay as they are; all other requests pass by.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith((f"/{RELEASE}", f"/{RESUME}")):
            await super().__call__(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        """The reply with its costs."""
        costs: StageCosts = {}
        request.scope[_SCOPE_KEY] = costs  # the same object, whoever copies the scope
        response = await call_next(request)
        is_good = costs and response.status_code == HTTPStatus.OK
        return JSONResponse({"stages": costs}) if is_good else response
