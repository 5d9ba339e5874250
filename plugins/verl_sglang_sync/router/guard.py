"""Removes a server from its router's workers when the server's actor ends, however the actor ends.

    guard = start_guard(GuardedWorker(router_url=url, router_api_key=None, worker=worker))
    ...
    guard.close()  # or the end of this process

Ray ends the actors of a finished driver with SIGKILL, so the actor itself cannot remove the server.
The guard is a process of its own. It waits for the end of its standard input, which is a pipe from
the actor, and then sends one request.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import IO

import msgspec

from verl_sglang_sync.engine.server_client.errors import RouterError
from verl_sglang_sync.router.client import RouterClient, Worker

TIMEOUT_S = 10.0


class GuardedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """The worker to remove, and its router. The guard reads them as its first line of input."""

    router_url: str
    router_api_key: str | None
    worker: Worker


def start_guard(guarded: GuardedWorker) -> IO[bytes]:
    """Start the guard.

    Returns:
        The guard's pipe. The guard removes the worker when the pipe is closed or this process ends.

    Raises:
        subprocess.CalledProcessError: the guard's parent process failed.
    """
    command = [sys.executable, "-m", "verl_sglang_sync.router.guard"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(guarded) + b"\n")
    child.stdin.flush()
    if status := child.wait():  # the child exits once it has forked the guard
        raise subprocess.CalledProcessError(status, command)
    return child.stdin


def main() -> int:
    """Wait for the end of standard input, remove the worker, and return the exit status."""
    # Ray kills the children of a worker that ends. The guard must be a grandchild in a session of
    # its own.
    if os.fork():
        return 0
    os.setsid()
    line = sys.stdin.buffer.readline()
    sys.stdin.buffer.read()
    guarded = msgspec.json.decode(line, type=GuardedWorker)
    router = RouterClient(guarded.router_url, timeout_s=TIMEOUT_S, api_key=guarded.router_api_key)
    try:
        router.remove(guarded.worker)
    except RouterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
