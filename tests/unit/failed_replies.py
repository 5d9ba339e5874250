"""An engine whose replies to updates are bad or lost, and a request with such a reply."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from verl_sglang_sync.engine.server_client import ConnectionBroken, RequestFailed, ServerError
from verl_sglang_sync.sync.ranks_in_step import OpeningRequest

BAD = RequestFailed("the engine is out of memory", endpoint="http://h:1/update", status=400)
LOST = ConnectionBroken("the reply was lost", endpoint="http://h:1/update")


class FailsReplies:
    """The part of an `Updater` that opens sessions; `error` is its reply, at once."""

    def __init__(self, error: ServerError) -> None:
        self._error = error

    def start_update(self, *_: Any, **__: Any) -> Future[None]:
        """Fails at once."""
        reply: Future[None] = Future()
        reply.set_exception(self._error)
        return reply


def failed_request(error: ServerError) -> OpeningRequest:
    """It has left, and this is its reply."""
    request = OpeningRequest(FailsReplies(error), "1")  # type: ignore[arg-type]
    request.post([b"an invitation"])
    return request
