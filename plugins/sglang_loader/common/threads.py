"""Threads for steps that may never return."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

Result = TypeVar("Result")

MAX_IDLE = 2
"""Number of idle threads that are kept."""

_idle: list[SimpleQueue[Callable[[], None]]] = []  # of each idle thread, for its next step
os.register_at_fork(after_in_child=_idle.clear)  # a forked child has none of these threads


def in_thread(step: Callable[[Future[Result]], Result], name: str) -> Future[Result]:
    """Run a step in a daemon thread, which does not keep the process alive, and return its future.

    Cancelling the future ends only the wait for the step. The step gets the future as its argument,
    and may check whether the future was cancelled.
    """
    future: Future[Result] = Future()
    threading.Thread(target=_finish, args=(step, future), daemon=True, name=name).start()
    return future


def in_kept_thread(step: Callable[[Future[Result]], Result], name: str) -> Future[Result]:
    """Run a step as `in_thread` does, in an idle thread of an earlier call if there is one.

    For steps that come often and change no state of their thread. A new thread starts up to a
    millisecond later.

    Args:
        name: of a new thread.
    """
    future: Future[Result] = Future()
    try:
        steps = _idle.pop()
    except IndexError:
        steps = SimpleQueue()
        threading.Thread(target=_run_steps, args=(steps,), daemon=True, name=name).start()
    steps.put(partial(_finish, step, future))
    return future


def _finish(step: Callable[[Future[Result]], Result], future: Future[Result]) -> None:
    with suppress(InvalidStateError):  # the future was cancelled
        try:
            future.set_result(step(future))
        except Exception as error:
            future.set_exception(error)


def _run_steps(steps: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        run = steps.get()
        run()
        del run  # what the step holds
        if len(_idle) >= MAX_IDLE:
            return
        _idle.append(steps)
