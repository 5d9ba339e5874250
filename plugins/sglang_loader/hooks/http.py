"""Hooks in the process that serves HTTP.

A reply to a release or a resume of memory has the costs, or the reason of a refusal. Users request
proofs (`hooks.proof_requests`). A request that waits at the schedulers' gate does not block the
sync that it waits for (`UpdateLock`). A request to an engine that is about to become idle is
repeated (`ask_until_idle`).
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

from sglang_loader.common.replies import StageCosts, joined
from sglang_loader.common.session.messages import SESSION_FORMAT
from sglang_loader.hooks.proof_requests import add_endpoints, proofs
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
    """A release or a resume that the engine refused without any change. The text has the reason."""


def launch_with_middleware(original: Original, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `Engine._launch_subprocesses`: add our middleware and the endpoints for proofs."""
    arguments = kwargs["server_args"] if "server_args" in kwargs else args[0]
    # An engine without HTTP has not imported the server's module.
    if is_ours(arguments) and HTTP_SERVER in sys.modules:
        app = sys.modules[HTTP_SERVER].app
        # SGLang adds its check of API keys later, and therefore outside of this middleware.
        if not any(entry.cls is StageReplyMiddleware for entry in app.user_middleware):
            app.add_middleware(StageReplyMiddleware)
        add_endpoints(app)
        if starts_random(arguments):
            mark_warm_ups(sys.modules[HTTP_SERVER])  # the gate holds back what is not marked
    return original(cls, *args, **kwargs)


def _costs_or_raise(stage: str) -> Callable[..., Awaitable[StageCosts | None]]:
    """Make a hook that wraps the method `stage` of `TokenizerControlMixin`.

    The hook returns the costs of the stage, and stores them in the scope of `request`.

    Raises:
        MemoryRequestRefused: the engine refused. The hook raises this.
    """

    async def hook(
        original: Original, manager: Any, obj: Any, request: Any = None
    ) -> StageCosts | None:
        if not is_ours(manager.server_args):
            await original(manager, obj, request)
            return None
        manager.auto_create_handle_loop()  # SGLang's own method begins with this, too
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
    """A wrapper of SGLang's lock between requests and updates. A closed gate disables the lock.

    Attributes:
        is_gate_closed: the state in the engine's last reply.
    """

    def __init__(self, lock: Any, *, is_gate_closed: bool = False) -> None:
        self._lock = lock
        self.is_gate_closed = is_gate_closed

    @property
    def writer_lock(self) -> AbstractAsyncContextManager[Any]:
        """The context that an update enters."""
        # A request holds the lock until the request is answered, and an update waits for the lock.
        # So a request that waits at the gate for an update would block that update. While the gate
        # is closed, no other request runs: the gate closes only if the engine is idle.
        if self.is_gate_closed:
            return nullcontext()
        lock: AbstractAsyncContextManager[Any] = self._lock.writer_lock
        return lock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def update_lock_of(manager: Any) -> UpdateLock:
    """Return the lock of a tokenizer manager. The first call wraps the lock."""
    if not isinstance(manager.model_update_lock, UpdateLock):
        is_gate_closed = starts_random(manager.server_args)  # until the engine's first reply
        manager.model_update_lock = UpdateLock(
            manager.model_update_lock, is_gate_closed=is_gate_closed
        )
    lock: UpdateLock = manager.model_update_lock
    return lock


def note_gate(manager: Any, replies: Sequence[Any]) -> None:
    """Update the lock if the engine's replies have the state of its gate."""
    if reasons := [facts_of(reply)["closed"] for reply in replies if "closed" in facts_of(reply)]:
        update_lock_of(manager).is_gate_closed = any(reasons)


async def ask_until_idle(
    manager: Any, communicator: Callable[[Any], Awaitable[Iterable[Any]]], request: Any
) -> list[Any]:
    """Send the engine a request, again while the engine is busy, for up to `BUSY_WAIT_S`.

    Returns:
        The engine's last replies.
    """
    # The scheduler may not have finished with requests that are answered already. Such a scheduler
    # refuses before it touches anything (`is_busy`). During an update no new requests come: the
    # caller of an update holds the writer lock, or has paused generation.
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
    """Send the engine an update request as `ask_until_idle` does.

    A fact in the request is True if a user waits for a proof. The outcome of a proof is recorded.
    """
    if request.load_format != SESSION_FORMAT:
        return await ask_until_idle(manager, communicator, request)
    request.rid = None  # facts travel in this field: drop a client's own value
    num_requests, started = proofs.num_requests, time.monotonic()
    request = with_facts(request, wants_proof=proofs.requested)
    replies = await ask_until_idle(manager, communicator, request)
    seconds = time.monotonic() - started
    proofs.note(replies, request.weight_version, seconds, num_requests)
    return replies


async def update(original: Original, manager: Any, obj: Any, request: Any = None) -> Any:
    """Wrap `TokenizerControlMixin.update_weights_from_tensor`: repeat it while the engine is busy.

    The lock is wrapped, too.
    """
    if is_ours(manager.server_args):
        communicator = manager.update_weights_from_tensor_communicator
        if not isinstance(communicator, partial):  # not wrapped yet
            wrapped = partial(ask_for_update, manager, communicator)
            manager.update_weights_from_tensor_communicator = wrapped
        update_lock_of(manager)
    return await original(manager, obj, request)


class StageReplyMiddleware(BaseHTTPMiddleware):
    """A middleware that puts the costs into replies to releases and resumes.

    SGLang's endpoints answer `null`. The hook stores the costs in the request's scope. The costs
    become the body: `{"stages": {"weights": {"seconds": [...]}}}`, see `replies`. Without costs
    the reply stays as it is.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith((f"/{RELEASE}", f"/{RESUME}")):
            await super().__call__(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        """Return the reply, with the costs as its body if there are any."""
        costs: StageCosts = {}
        request.scope[_SCOPE_KEY] = costs  # the same object in each copy of the scope
        response = await call_next(request)
        is_good = costs and response.status_code == HTTPStatus.OK
        return JSONResponse({"stages": costs}) if is_good else response
