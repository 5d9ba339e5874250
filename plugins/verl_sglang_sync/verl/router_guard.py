"""Takes a server out of its router's workers when the server's actor ends, however it ends.

Ray ends the actors of a finished driver with SIGKILL, so nothing in the actor could do it. A small
process of its own does: it waits for the end of its standard input, which is a pipe from the actor.
Ray also kills the children of a worker that ends; so this is a child's child, in its own session,
and it lives no longer than the one request after the actor's end.

    guard = start_guard(Watch(router_url=url, router_api_key=None, worker=worker))
    ...
    guard.close()  # or the end of this process
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import IO

import msgspec

from verl_sglang_sync.engine.server_client.errors import RouterError
from verl_sglang_sync.engine.server_client.router import RouterClient, Worker

TIMEOUT_S = 10.0


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """What to take out, and where; goes to the guard as its first line."""

    router_url: str
    router_api_key: str | None
    worker: Worker


def start_guard(watch: Watch) -> IO[bytes]:
    """Start the process; the server stays until what is returned is closed, or this one ends."""
    command = [sys.executable, "-m", "verl_sglang_sync.verl.router_guard"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(watch) + b"\n")
    child.stdin.flush()
    if status := child.wait():  # its own child goes on
        raise subprocess.CalledProcessError(status, command)
    return child.stdin


def main() -> int:
    if os.fork():
        return 0
    os.setsid()
    line = sys.stdin.buffer.readline()
    sys.stdin.buffer.read()
    watch = msgspec.json.decode(line, type=Watch)
    router = RouterClient(watch.router_url, timeout_s=TIMEOUT_S, api_key=watch.router_api_key)
    try:
        router.remove(watch.worker)
    except RouterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
