"""Ray ends server actors in its own ways; after each the server is out of its router."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.forks import TESTS
from support.router import router_process, wait_until_up, workers_of
from verl_sglang_sync.bench.engine_server import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DRIVER = """
import asyncio
import sys
import time

import ray

from support.router import workers_of
from verl_sglang_sync.verl.router_guard import Watch, start_guard
from verl_sglang_sync.engine.server_client.router import RouterClient


class Server:
    async def join(self, router_url, url):
        async with RouterClient(router_url, timeout_s=30) as router:
            worker = await router.add(url)
        watch = Watch(router_url=router_url, router_api_key=None, worker=worker)
        self.guard = await asyncio.to_thread(start_guard, watch)


def wait_for(*names):
    deadline = time.monotonic() + 30
    while set(workers_of(router_url)) != {f"http://{name}:1" for name in names}:
        assert time.monotonic() < deadline, workers_of(router_url)
        time.sleep(0.1)


router_url = sys.argv[1]
ray.init(num_cpus=1, include_dashboard=False, logging_level="error")
names = ("killed", "forgotten", "left")
actors = {name: ray.remote(Server).options(num_cpus=0).remote() for name in names}
ray.get([actor.join.remote(router_url, f"http://{name}:1") for name, actor in actors.items()])
wait_for(*names)
ray.kill(actors["killed"])
wait_for("forgotten", "left")
del actors["forgotten"]
wait_for("left")
"""


def test_a_server_leaves_its_router_however_ray_ends_its_actor(tmp_path: Path) -> None:
    """By `ray.kill`, without a handle left, and with the driver."""
    with router_process(tmp_path, "127.0.0.1", free_port(), real=False) as router_url:
        wait_until_up(router_url)
        path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
        subprocess.run(
            [sys.executable, "-c", DRIVER, router_url],
            env={**os.environ, "PYTHONPATH": path},
            check=True,
            timeout=120,
        )
        deadline = time.monotonic() + 30
        while workers_of(router_url) != []:
            assert time.monotonic() < deadline, "the driver's end left a server in the router"
            time.sleep(0.1)
