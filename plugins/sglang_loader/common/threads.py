"""Threads for steps that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")


def in_thread(step: Callable[[Future[Result]], Result], name: str) -> Future[Result]:
    """Run a step in a daemon thread, which does not keep the process alive, and return its future.

    Cancelling the future ends only the wait for the step. The step gets the future as its argument,
    and may check whether the future was cancelled.
    """
    future: Future[Result] = Future()

    def run() -> None:
        with suppress(InvalidStateError):  # the future was cancelled
            try:
                future.set_result(step(future))
            except Exception as error:
                future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future
