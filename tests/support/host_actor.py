"""A server actor of verl's as a process on one of `support.hosts`: its methods, called from here.

    actor = HostActor(host, folder, kwargs={...}, environment={...})
    port = await actor.launch_server.remote(master_address=..., master_port=...)
    actor.end()

verl's own `launch_servers` makes and calls them as it does Ray's actors, of which they have what it
uses. The process speaks pickles through two pipes; what verl prints goes to the folder's log.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from support.forks import TESTS, die_with_parent
from support.hosts import Host


class HostActors:
    """In the place of `ray.remote(class)`: the n-th actor runs on the n-th host.

    Args:
        hosts: where.
        folder: gets a log for each, `actor<n>.log`.
        environment: of the processes.
    """

    def __init__(self, hosts: Sequence[Host], folder: Path, environment: Mapping[str, str]) -> None:
        self._free: Iterator[tuple[int, Host]] = iter(enumerate(hosts))
        self._folder = folder
        self._environment = environment
        self.made: list[HostActor] = []

    def options(self, **_: Any) -> HostActors:
        """Where verl says on which node."""
        return self

    def remote(self, **kwargs: Any) -> HostActor:
        """Start the next actor."""
        number, host = next(self._free)
        log = self._folder / f"actor{number}.log"
        self.made.append(HostActor(host, log, {**self._environment, **host.environment}, kwargs))
        return self.made[-1]

    def end(self) -> None:
        for actor in self.made:
            actor.end()


class HostActor:
    """One process around one `WeightSyncHttpServer`."""

    def __init__(
        self, host: Host, log: Path, environment: Mapping[str, str], kwargs: dict[str, Any]
    ) -> None:
        self.log = log
        requests, to_process = os.pipe()
        from_process, replies = os.pipe()
        command = [sys.executable, "-m", "support.host_actor", str(requests), str(replies)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*host.prefix, *command, host.address],
                env={**environment, "PYTHONPATH": os.pathsep.join([TESTS, *sys.path])},
                pass_fds=(requests, replies),
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )
        os.close(requests)
        os.close(replies)
        self._to_process: BinaryIO = os.fdopen(to_process, "wb")
        self._from_process: BinaryIO = os.fdopen(from_process, "rb")
        self._made = False
        self._kwargs = kwargs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(self, name)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if not self._made:
            self._made = True
            self._ask("__init__", (), self._kwargs)
        return self._ask(name, args, kwargs)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def _ask(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            pickle.dump((name, args, kwargs), self._to_process)
            self._to_process.flush()
            result, error = pickle.load(self._from_process)
        except (EOFError, BrokenPipeError) as lost:
            tail = self.log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"{name}: the actor's process died:\n{tail}") from lost
        if error is not None:
            raise RuntimeError(f"{name}: {error}")
        return result


class _Method:
    def __init__(self, actor: HostActor, name: str) -> None:
        self._actor = actor
        self._name = name

    async def remote(self, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(self._actor.call, self._name, *args, **kwargs)


async def _serve(requests: BinaryIO, replies: BinaryIO, address: str) -> None:
    """The process: makes the server, then runs its methods until the pipe ends."""
    from verl.workers.rollout.sglang_rollout import async_sglang_server as verls

    from verl_sglang_sync.verl.replica import WeightSyncHttpServer

    verls.ray.util.get_node_ip_address = lambda: address  # Ray's, of the node
    server: Any = None
    while True:
        try:
            name, args, kwargs = await asyncio.to_thread(pickle.load, requests)
        except EOFError:
            return
        result = error = None
        try:
            if name == "__init__":
                server = WeightSyncHttpServer(*args, **kwargs)
            else:
                result = getattr(server, name)(*args, **kwargs)
                result = await result if asyncio.iscoroutine(result) else result
        except Exception:
            result, error = None, traceback.format_exc()
        pickle.dump((result, error), replies)
        replies.flush()


if __name__ == "__main__":
    pipes = os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb")
    asyncio.run(_serve(*pipes, sys.argv[3]))
