"""Takes a server out of its router's workers when the server's actor ends, however it ends.

Ray ends the actors of a finished driver with SIGKILL, so nothing in the actor could do it. A small
process of its own does: it waits for the end of its standard input, which is a pipe from the actor.

    guard = start_guard(Watch(router_url=url, router_api_key=None, worker=worker))
    ...
    guard.stdin.close()  # or the end of this process
"""

from __future__ import annotations

import asyncio
import subprocess
import sys

import msgspec

from verl_sglang_sync.server_client.errors import RouterError
from verl_sglang_sync.server_client.router import RouterClient, Worker

TIMEOUT_S = 10.0


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """What to take out, and where; goes to the guard as its first line."""

    router_url: str
    router_api_key: str | None
    worker: Worker


def start_guard(watch: Watch) -> subprocess.Popen[bytes]:
    """Start the process; keep what is returned for as long as the server shall stay."""
    guard = subprocess.Popen(
        [sys.executable, "-m", "verl_sglang_sync.router_guard"],
        stdin=subprocess.PIPE,
        start_new_session=True,  # a signal to the actor's group is not for the guard
    )
    assert guard.stdin is not None
    guard.stdin.write(msgspec.json.encode(watch) + b"\n")
    guard.stdin.flush()
    return guard


async def remove(watch: Watch) -> None:
    """Take the server out now."""
    async with RouterClient(
        watch.router_url, timeout_s=TIMEOUT_S, api_key=watch.router_api_key
    ) as router:
        await router.remove(watch.worker)


def main() -> int:
    """The guard's process."""
    line = sys.stdin.buffer.readline()
    sys.stdin.buffer.read()
    try:
        asyncio.run(remove(msgspec.json.decode(line, type=Watch)))
    except RouterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
