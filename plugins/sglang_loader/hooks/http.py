"""Hooks in the process that serves HTTP.

Replies to releases and resumes of memory tell their costs, or why they were refused. Users ask for
proofs (`hooks.proof`). A request that
waits at the schedulers' gate does not block the sync that it waits for (`UpdateLock`), and a
request to an engine that is about to become idle is repeated (`ask_until_idle`).
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

from sglang_loader.common.session.messages import SESSION_FORMAT
from sglang_loader.common.stage_costs import StageCosts, joined
from sglang_loader.hooks.proof import add_endpoints, proofs
from sglang_loader.upstream import (
    facts_of,
    is_ours,
    mark_warm_ups,
    starts_random,
    with_facts,
)

HTTP_SERVER = "sglang.srt.entrypoints.http_server"
BUSY_WAIT_S = 5.0
BUSY_POLL_S = 0.005

_SCOPE_KEY = "verl_sglang_sync.stage_costs"

Original = Callable[..., Any]


class MemoryRequestRefused(RuntimeError):
    """The engine refused a release or a resume and changed nothing; the message says why."""


def launch_with_middleware(original: Original, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `Engine._launch_subprocesses`: adds the middleware that puts costs into replies, and
    the endpoints for proofs.

    An engine without HTTP has not imported the server's module. SGLang adds its check of API keys
    later, and therefore outside of this middleware.
    """
    arguments = kwargs["server_args"] if "server_args" in kwargs else args[0]
    if is_ours(arguments) and HTTP_SERVER in sys.modules:
        app = sys.modules[HTTP_SERVER].app
        if not any(entry.cls is StageReplyMiddleware for entry in app.user_middleware):
            app.add_middleware(StageReplyMiddleware)
        add_endpoints(app)
        if starts_random(arguments):
            mark_warm_ups(sys.modules[HTTP_SERVER])  # the gate holds back what is not marked
    return original(cls, *args, **kwargs)


def _costs_or_raise(stage: str) -> Callable[..., Awaitable[StageCosts | None]]:
    """A hook AROUND the method `stage` of `TokenizerControlMixin`: returns the costs of the stage
    and leaves them in the scope of `request`. Raises MemoryRequestRefused if the engine refused.
    """

    async def hook(
        original: Original, manager: Any, obj: Any, request: Any = None
    ) -> StageCosts | None:
        if not is_ours(manager.server_args):
            await original(manager, obj, request)
            return None
        manager.auto_create_handle_loop()
        replies = await ask_until_idle(manager, getattr(manager, f"{stage}_communicator"), obj)
        if refusals := [
            facts_of(reply)["refusal"] for reply in replies if "refusal" in facts_of(reply)
        ]:
            raise MemoryRequestRefused("\n".join(refusals))
        costs = joined([facts_of(reply).get("costs", {}) for reply in replies])
        # There may be no request, or no middleware.
        getattr(request, "scope", {}).get(_SCOPE_KEY, {}).update(costs)
        return costs

    return hook


RELEASE, RESUME = "release_memory_occupation", "resume_memory_occupation"
release_or_raise, resume_or_raise = _costs_or_raise(RELEASE), _costs_or_raise(RESUME)


class UpdateLock:
    """Wraps SGLang's lock between requests and updates: without effect while the gate is closed.

    A request holds the lock until it is answered, and an update waits for the lock, so a request
    that waits at the gate for an update would block it. Nothing else runs then: the gate closes
    only while the engine is idle. `is_gate_closed`: as the engine has last told.
    """

    def __init__(self, lock: Any, *, is_gate_closed: bool = False) -> None:
        self._lock = lock
        self.is_gate_closed = is_gate_closed

    @property
    def writer_lock(self) -> AbstractAsyncContextManager[Any]:
        """The context that an update enters."""
        if self.is_gate_closed:
            return nullcontext()
        lock: AbstractAsyncContextManager[Any] = self._lock.writer_lock
        return lock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def update_lock_of(manager: Any) -> UpdateLock:
    """The lock of a tokenizer manager, wrapped when first used."""
    if not isinstance(manager.model_update_lock, UpdateLock):
        is_gate_closed = starts_random(manager.server_args)  # until the engine tells otherwise
        manager.model_update_lock = UpdateLock(
            manager.model_update_lock, is_gate_closed=is_gate_closed
        )
    lock: UpdateLock = manager.model_update_lock
    return lock


def note_gate(manager: Any, replies: Sequence[Any]) -> None:
    """Update the lock if the engine's replies tell whether its gate is closed."""
    if reasons := [facts_of(reply)["closed"] for reply in replies if "closed" in facts_of(reply)]:
        update_lock_of(manager).is_gate_closed = any(reasons)


async def ask_until_idle(
    manager: Any, communicator: Callable[[Any], Awaitable[Iterable[Any]]], request: Any
) -> list[Any]:
    """Send the engine a request, again while it is busy, for up to `BUSY_WAIT_S`; its last replies.

    The scheduler may not have finished with requests that are answered already: it then refuses
    before it touches anything (`is_busy`). During an update no new requests come: its caller holds
    the writer lock, or has paused generation.
    """
    deadline = time.monotonic() + BUSY_WAIT_S
    while True:
        replies = list(await communicator(request))
        is_busy = any(facts_of(reply).get("is_busy") for reply in replies)
        if not is_busy or time.monotonic() > deadline:
            note_gate(manager, replies)
            return replies
        await asyncio.sleep(BUSY_POLL_S)


async def ask_for_update(
    manager: Any, communicator: Callable[[Any], Awaitable[Iterable[Any]]], request: Any
) -> list[Any]:
    """Like `ask_until_idle`, for an update: passes on that a proof is asked for, and records the
    outcome of one.
    """
    if request.load_format != SESSION_FORMAT:
        return await ask_until_idle(manager, communicator, request)
    request.rid = None  # what a client has sent there is no fact
    request, started = with_facts(request, wants_proof=proofs.requested), time.monotonic()
    replies = await ask_until_idle(manager, communicator, request)
    proofs.note(replies, request.weight_version, time.monotonic() - started)
    return replies


async def update(original: Original, manager: Any, obj: Any, request: Any = None) -> Any:
    """AROUND `TokenizerControlMixin.update_weights_from_tensor`: repeats it while the engine is
    busy, and wraps the lock.
    """
    if is_ours(manager.server_args):
        communicator = manager.update_weights_from_tensor_communicator
        if not isinstance(communicator, partial):  # not wrapped yet
            wrapped = partial(ask_for_update, manager, communicator)
            manager.update_weights_from_tensor_communicator = wrapped
        update_lock_of(manager)
    return await original(manager, obj, request)


class StageReplyMiddleware(BaseHTTPMiddleware):
    """Replies to releases and resumes with their costs, where SGLang's endpoints answer `null`.

    The hook leaves the costs in the request's scope, and they become the body: `{"stages":
    {"weights": {"seconds": [...]}}}`, see `stage_costs`. Without costs the reply stays as it is.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith((f"/{RELEASE}", f"/{RESUME}")):
            await super().__call__(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        """The reply, with the costs as its body if there are any."""
        costs: StageCosts = {}
        request.scope[_SCOPE_KEY] = costs  # the same object, whoever copies the scope
        response = await call_next(request)
        is_good = costs and response.status_code == HTTPStatus.OK
        return JSONResponse({"stages": costs}) if is_good else response
