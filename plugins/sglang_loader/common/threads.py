"""A thread of its own for what may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")


def in_thread(step: Callable[[Future[Result]], Result], name: str) -> Future[Result]:
    """Run a step, which gets the future, in a daemon thread; the future gets what comes of it.

    One that never returns keeps no process alive. Cancelling the future ends the wait for it alone;
    the step may look whether it was cancelled.
    """
    future: Future[Result] = Future()

    def run() -> None:
        with suppress(InvalidStateError):  # it was cancelled
            try:
                future.set_result(step(future))
            except Exception as error:
                future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future
