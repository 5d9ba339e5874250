"""Ray ends server actors in its own ways; after each the server is out of its router."""

import asyncio
import sys
import time

import pytest

from support.router import RouterProcess
from verl_sglang_sync.router.client import RouterClient
from verl_sglang_sync.router.guard import GuardedWorker, start_guard

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


class Server:
    """An actor."""

    async def join(self, router_url, url):
        router = RouterClient(router_url, timeout_s=30)
        worker = await asyncio.to_thread(router.add, url)
        watch = GuardedWorker(router_url=router_url, router_api_key=None, worker=worker)
        self.guard = await asyncio.to_thread(start_guard, watch)


@pytest.fixture
def router(tmp_path):
    process = RouterProcess(tmp_path / "router.log")
    yield process
    process.end()


def wait_for(router, *names):
    deadline = time.monotonic() + 30
    while set(router.workers()) != {f"http://{name}:1" for name in names}:
        assert time.monotonic() < deadline, router.workers()
        time.sleep(0.1)


def test_a_server_leaves_its_router_at_any_end(router):
    """By `ray.kill`, without a handle left, and with the driver."""
    import ray

    names = ("killed", "forgotten", "left")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(num_cpus=1, include_dashboard=False, logging_level="error")
    try:
        actors = {name: ray.remote(Server).options(num_cpus=0).remote() for name in names}
        ray.get([actor.join.remote(router.url, f"http://{n}:1") for n, actor in actors.items()])
        wait_for(router, *names)
        ray.kill(actors["killed"])
        wait_for(router, "forgotten", "left")
        del actors["forgotten"]
        wait_for(router, "left")
    finally:
        ray.shutdown()
    wait_for(router)
