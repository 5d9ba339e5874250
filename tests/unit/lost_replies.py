"""An engine whose replies to updates are lost, and a request of which nobody has seen the reply."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from verl_sglang_sync.sync.ranks_in_step import OpeningRequest


class LosesReplies:
    """The part of an `Updater` that opens sessions."""

    def start_update(self, *_: Any, **__: Any) -> Future[None]:
        """Fails at once."""
        reply: Future[None] = Future()
        reply.set_exception(ConnectionError("the reply was lost"))
        return reply


def lost_reply() -> OpeningRequest:
    """It has left, and its reply is lost."""
    request = OpeningRequest(LosesReplies(), "1")  # type: ignore[arg-type]
    request.post([b"an invitation"])
    return request
