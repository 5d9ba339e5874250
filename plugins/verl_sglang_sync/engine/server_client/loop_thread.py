"""An event loop in a thread of its own, so that all callers share the connections.

A connection belongs to one event loop, but a trainer calls from many: from short-lived ones
(`asyncio.run` for each stage), from one that it blocks meanwhile, and from threads without one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

CANCEL_TIMEOUT_S = 1.0

Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines in one thread, which starts with the first coroutine, and again after `stop`;
    `last` is awaited in the loop before it stops.
    """

    def __init__(self, name: str, last: Callable[[], Awaitable[None]]) -> None:
        self._name = name
        self._last = last
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine; cancelling the future cancels it."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name=self._name, daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> threading.Thread | None:
        """Make the loop cancel its coroutines, await `last` and end; returns the thread, if there
        is one, without waiting for it.
        """
        with self._lock:
            loop, self._loop = self._loop, None
            thread, self._thread = self._thread, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(_finish(loop, self._last), loop)
        return thread


async def _finish(loop: asyncio.AbstractEventLoop, last: Callable[[], Awaitable[None]]) -> None:
    try:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:  # so that whoever waits for them learns of it
            await asyncio.wait(others, timeout=CANCEL_TIMEOUT_S)
        await last()
    finally:
        loop.stop()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
