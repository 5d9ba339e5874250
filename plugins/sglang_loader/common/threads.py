"""Runs a step that may never return in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")


def in_thread(step: Callable[[Future[Result]], Result], name: str) -> Future[Result]:
    """Run a step in a daemon thread, which does not keep the process alive; returns its future.

    Cancelling the future ends only the wait for it. The step gets the future, and may check whether
    it was cancelled.
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
