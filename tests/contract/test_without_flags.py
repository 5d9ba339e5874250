"""Installed but not switched on: the server receives exactly what verl's own adapter sends.

Both rollouts run the same wake-up, sync and sleep against a real HTTP server that records every
request, with a real Ray actor in the place where verl looks for its server.
"""

import asyncio
import base64
import inspect
import json
from typing import Any

import pytest
import torch
from aiohttp import web
from tiny_assets import make_assets

from sglang_loader.common.shared_memory import share_on_host
from unit.composed_recipe import ROLLOUT, compose

pytestmark = pytest.mark.e2e

Request = tuple[str, str, dict[str, str], Any]
CHANGING_HEADERS = ("Host", "Content-Length")  # the port, and the length of random memory names


@pytest.fixture(scope="module")
def rollout(tmp_path_factory):
    """verl's rollout and model config, a one-rank process group, a local Ray."""
    import ray
    import torch.distributed as dist
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    folder = tmp_path_factory.mktemp("plain")
    make_assets(folder)
    config = compose(
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"actor_rollout_ref.model.path={folder}/model",
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=1",
    )
    OmegaConf.resolve(config)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", 0), ("RAY_LOCAL_WORLD_SIZE", 1), ("SGLANG_USE_CPU_ENGINE", 1)):
            patch.setenv(name, str(value))
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        ray.init(num_cpus=1, include_dashboard=False, logging_level="error")
        actor = config.actor_rollout_ref
        yield omega_conf_to_dataclass(actor.rollout), omega_conf_to_dataclass(actor.model)
        ray.shutdown()
        dist.destroy_process_group()


def requests_of(adapter_class, rollout):
    """What the server receives in one cycle of `adapter_class`."""
    import ray

    seen = []

    async def record(request):
        body = await request.text()
        headers = {k: v for k, v in request.headers.items() if k not in CHANGING_HEADERS}
        payload = json.loads(body) if body else None
        seen.append((request.method, request.raw_path, headers, _readable(payload)))
        return web.json_response({"success": True, "message": "ok"})

    class Server:  # not the module's: Ray's workers cannot import that
        """In the place of verl's."""

        def __init__(self, port):
            self.port = port
            self.steps = []

        def get_server_address(self):
            return "127.0.0.1", self.port

        def set_global_steps(self, steps):
            self.steps.append(steps)

        def get_steps(self):
            return self.steps

    async def cycle():
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{tail:.*}", record)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server = ray.remote(Server).options(name="sglang_server_0_0")
        actor = server.remote(runner.addresses[0][1])
        try:
            adapter = adapter_class(config=rollout[0], model_config=rollout[1], device_mesh=None)
            await adapter.resume(tags=["weights"])
            await adapter.update_weights(iter(_weights()), global_steps=7)
            await adapter.resume(tags=["kv_cache"])
            await adapter.release()
            seen.append(("actor", "set_global_steps", {}, await actor.get_steps.remote()))
        finally:
            ray.kill(actor)
            await runner.cleanup()

    asyncio.run(cycle())
    return seen


def _weights():
    """Several buckets of 1 MiB, of two dtypes, and shared: verl would try that once only."""
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16)
    tensors = [torch.randn(300, 700, generator=generator).to(dtypes[i % 2]) for i in range(6)]
    return [(f"layer.{i}.weight", share_on_host(tensor)) for i, tensor in enumerate(tensors)]


def _readable(payload):
    """Replace the handles, whose shared-memory names are random, by the tensors behind them."""
    if not isinstance(payload, dict) or "serialized_named_tensors" not in payload:
        return payload
    from sglang.srt.utils import MultiprocessingSerializer

    ranks = [
        [
            (name, handle.get(0).tolist())
            for name, handle in MultiprocessingSerializer.deserialize(base64.b64decode(item))
        ]
        for item in payload["serialized_named_tensors"]
    ]
    return {**payload, "serialized_named_tensors": ranks}


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    """CPU tensors cross processes by name; see `bench.cpu_tensors`."""
    from torch.multiprocessing import get_sharing_strategy, reductions, set_sharing_strategy

    before = get_sharing_strategy()
    set_sharing_strategy("file_system")
    monkeypatch.setattr(reductions, "_reduce_tensor_original", None, raising=False)
    yield
    set_sharing_strategy(before)


def test_without_a_preset_requests_and_server_are_verls(rollout, monkeypatch):
    from verl.workers.engine import FSDPEngine
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class
    from verl.workers.rollout.sglang_rollout import sglang_rollout
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer
    from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter

    from verl_sglang_sync.verl.rollout import WeightSyncRollout

    if missing := AsyncHttpServerAdapter.__abstractmethods__:
        pytest.skip(f"verl alone does not run with this SGLang: {', '.join(sorted(missing))}")
    monkeypatch.setattr(sglang_rollout, "get_device_id", lambda: "cpu")
    export = inspect.unwrap(FSDPEngine.get_per_tensor_param)  # a test before this one wraps it
    monkeypatch.setattr(FSDPEngine, "get_per_tensor_param", export)
    assert get_rollout_class("sglang") is WeightSyncRollout, "the plugin is installed"
    verls = requests_of(sglang_rollout.ServerAdapter, rollout)
    assert requests_of(WeightSyncRollout, rollout) == verls
    assert FSDPEngine.get_per_tensor_param is export, "verl's export is wrapped"
    assert [path for _, path, _, _ in verls] == [
        "/resume_memory_occupation",
        *["/update_weights_from_tensor"] * 6,
        "/flush_cache",
        "/resume_memory_occupation",
        "/release_memory_occupation",
        "set_global_steps",
    ]
    replica = get_rollout_replica_class("sglang")(0, *rollout, gpus_per_node=1)
    assert replica.server_class.__ray_actor_class__ is SGLangHttpServer
