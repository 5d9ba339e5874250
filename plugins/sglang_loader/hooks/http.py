"""What the hooks do in the process that serves HTTP (sglang 0.5.14)."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from sglang_loader.common.stage_costs import StageCosts, joined
from sglang_loader.hooks import stage_reply
from sglang_loader.hooks.requests import ask_until_idle, note_gate
from sglang_loader.upstream import is_ours

HTTP_SERVER = "sglang.srt.entrypoints.http_server"

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
        stage_reply.install(sys.modules[HTTP_SERVER].app)
    return original(cls, *args, **kwargs)


async def release_or_raise(original: Original, manager: Any, obj: Any, request: Any = None) -> Any:
    """AROUND `TokenizerControlMixin.release_memory_occupation`: see `_ask`."""
    communicator = manager.release_memory_occupation_communicator
    return await _ask(original, manager, communicator, obj, request)


async def resume_or_raise(original: Original, manager: Any, obj: Any, request: Any = None) -> Any:
    """AROUND `TokenizerControlMixin.resume_memory_occupation`: see `_ask`."""
    communicator = manager.resume_memory_occupation_communicator
    return await _ask(original, manager, communicator, obj, request)


async def _ask(
    original: Original,
    manager: Any,
    communicator: Callable[[Any], Awaitable[Iterable[Any]]],
    obj: Any,
    request: Any,
) -> StageCosts | None:
    """As the original, which drops the replies and returns nothing.

    Returns:
        What the stage cost; the reply to `request` carries it too.

    Raises:
        MemoryRequestRefused: what the engine refused, and why.
    """
    if not is_ours(manager.server_args):
        await original(manager, obj, request)
        return None
    manager.auto_create_handle_loop()
    replies = await ask_until_idle(communicator, obj)
    note_gate(manager, replies)  # where nothing was to be done they do not say anything
    if refusals := [text for text in (getattr(r, "refusal", None) for r in replies) if text]:
        raise MemoryRequestRefused("\n".join(refusals))
    costs = joined([getattr(reply, "costs", {}) for reply in replies])
    stage_reply.leave_costs(request, costs)
    return costs
