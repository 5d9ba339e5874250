"""Disaggregated syncs as verl 0.9.1 drives them: real Ray, its checkpoint engines and workers.

Trainer actors hold the weights of a model under FSDP2 and a checkpoint engine each; verl's own
`CheckpointEngineWorker`s are beside the servers, one for each engine rank. A sync is
`CheckpointEngineManager.update_weights`, of which `transfer` is the first trainer rank's part;
pausing generation and freeing the KV cache, which all backends pay alike, are left out.

`verl_nccl` is verl's backend `nccl`: the trainer's buckets go over NCCL to the workers, and on to
SGLang as named tensors over CUDA IPC. The others are ours, `sglang_sync`: `verl_disaggregated` in
mode compiled as it is, which reads the trainer's memory where the engines are on its node;
`verl_send` has the trainer's ranks send, as to another node; `verl_broadcast` has the first of them
broadcast verl's export, and so has `verl_flattened`, to engines without a load plan.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.arm import Seconds, Setting, measure_arm, run_arms
from benchmarks.arrival import engine_checksums
from sglang_loader.common.copies.strided import synchronize_device
from verl_sglang_sync.commands.bench.engine_server import wait_until_healthy

NATIVE = "verl_nccl"
SENT = {"mode": "compiled", "routes": ["exchange"]}
PRESETS: dict[str, dict[str, Any]] = {
    "verl_disaggregated": {"mode": "compiled"},
    "verl_send": SENT,
    "verl_broadcast": {**SENT, "routes": []},
    "verl_flattened": {"mode": "flattened"},
}
VERL_ARMS = (*PRESETS, NATIVE)
NUM_WARM_UPS = 4  # ours: a plan, and then a route for it, are each made and proven in a sync
TIMEOUT_S = 90.0
START_TIMEOUT_S = 240.0
METRICS = "weight_sync/"


def main() -> None:
    """Start Ray, the trainer and the workers, and measure.

    Command line: the setting, the file of the rows, arms and the servers' logs by URL, in JSON.
    """
    setting, rows = Setting.from_json(sys.argv[1]), Path(sys.argv[2])
    arms, servers = json.loads(sys.argv[3]), json.loads(sys.argv[4])
    if setting.device == "cpu":
        os.environ.update(VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="cpu_platform")
    import ray

    import verl_sglang_sync.verl_plugin  # noqa: F401  registers our backend

    ray.init(num_cpus=1, num_gpus=0, include_dashboard=False, log_to_driver=True)
    try:
        cluster = Cluster(setting, arms[0], list(servers))
        for url, log in servers.items():
            wait_until_healthy(url, Path(log))
        run_arms(arms, rows, lambda arm: _measure(arm, cluster, setting))
    finally:
        ray.shutdown()


def _measure(arm: str, cluster: Cluster, setting: Setting) -> dict[str, Any]:
    _check_backend(_backend(arm))
    cluster.use_arm(arm)
    notes: dict[str, Any] = {}
    row = measure_arm(
        arm,
        setting,
        warm_ups=1 if arm == NATIVE else NUM_WARM_UPS,
        sync=cluster.sync_with(_backend(arm), notes),
        advance=lambda: cluster.on_trainers("advance"),
        trainer_checksums=lambda: cluster.on_trainers("checksums")[0],
        held_by_engines=cluster.held_by_engines,
    )
    cluster.on_trainers("use_backend", None, setting.bucket_mb)
    return {**row, **cluster.on_trainers("sizes")[0], **notes}


def _backend(arm: str) -> str:
    return "nccl" if arm == NATIVE else "sglang_sync"


def _check_backend(backend: str) -> None:
    """Raises verl's own error, with the reason, where the backend could not be imported."""
    from verl.checkpoint_engine import CheckpointEngineRegistry

    CheckpointEngineRegistry.get(backend)


class Cluster:
    """The trainer's actors, and of each replica verl's workers and the actor for its server.

    Args:
        arm: the first one.
        urls: of the servers, which need not be up yet.
    """

    def __init__(self, setting: Setting, arm: str, urls: list[str]) -> None:
        import ray

        from verl_sglang_sync.engine.server_client.client import SGLangServerClient

        self._setting = setting
        self._trainers = _start(_trainer_class(), range(setting.trainers), setting)
        self._replicas = [
            Replica(_start(_worker_class(), setting.engine_gpus(i), setting, arm, i))
            for i in range(setting.replicas)
        ]
        self._clients = [SGLangServerClient(url, timeout_s=120) for url in urls]
        server = ray.remote(num_cpus=0)(ServerAddress)
        self._servers = [  # kept: an actor ends with its last handle
            server.options(name=f"sglang_server_{i}_0").remote(url) for i, url in enumerate(urls)
        ]
        workers = [worker.get_replica_rank.remote() for worker in self._workers]
        ray.get(workers + [t.sizes.remote() for t in self._trainers], timeout=START_TIMEOUT_S)

    @property
    def _workers(self) -> list[Any]:
        return [worker for replica in self._replicas for worker in replica.workers]

    def on_trainers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every trainer rank; what they return."""
        return _call(self._trainers, method, *arguments)

    def use_arm(self, arm: str) -> None:
        """Give every process the arm's checkpoint engine."""
        self.on_trainers("use_backend", _backend(arm), self._setting.bucket_mb)
        _call(self._workers, "use_arm", arm)

    def held_by_engines(self) -> list[dict[str, int]]:
        """Checksums of each replica's weights."""
        folders = self._setting.arrival_folders
        return [
            engine_checksums(client, folder, self._setting.engine_tp)
            for client, folder in zip(self._clients, folders, strict=True)
        ]

    def sync_with(self, backend: str, notes: dict[str, Any]) -> Any:
        """One sync through verl's manager, as a function that leaves its counts in `notes`."""
        import ray
        from verl.checkpoint_engine.base import CheckpointEngineManager
        from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
        from verl.workers.config import CheckpointEngineConfig

        seconds: dict[str, float] = {}

        class TimedManager(CheckpointEngineManager):  # type: ignore[misc]
            def build_process_group(self, rollout: Any) -> None:
                started = time.perf_counter()
                super().build_process_group(rollout)
                seconds["group"] = time.perf_counter() - started

        group = RayWorkerGroup(
            worker_handles=self._trainers,
            ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(_trainer_class())),
        )
        config = CheckpointEngineConfig(
            backend=backend, update_weights_bucket_megabytes=self._setting.bucket_mb
        )
        manager = TimedManager(config, group, self._replicas)
        step = 0

        def sync() -> Seconds:
            nonlocal step
            step += 1
            seconds.clear()
            started = time.perf_counter()
            metrics = manager.update_weights(global_steps=step)
            seconds["sync"] = time.perf_counter() - started
            seconds["transfer"] = self.on_trainers("transfer_seconds")[0]
            for name, value in metrics.items():
                key = name.removeprefix(METRICS)
                if key.endswith("_s") and key not in ("sync_s", "gigabytes_per_s"):
                    seconds[key.removesuffix("_s")] = value
                elif key.startswith("num_"):
                    notes[key] = value
                elif key == "staging_gigabytes":
                    notes["staging_bytes"] = round(value * 1e9)
            return dict(seconds)

        return sync


def _start(cls: type[Any], gpus: range, setting: Setting, *arguments: Any) -> list[Any]:
    """A group of actors, one for each GPU, with the environment of verl's `RayWorkerGroup`.

    Ray hands out no GPUs: an actor's is named, so that all can start side by side.
    """
    import ray

    environment = {
        "WORLD_SIZE": str(len(gpus)),
        "RAY_LOCAL_WORLD_SIZE": str(len(gpus)),
        "WG_BACKEND": "ray",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    actors = []
    for rank, gpu in enumerate(gpus):
        variables = {**environment, "RANK": str(rank)}
        if setting.device == "cuda":
            variables["CUDA_VISIBLE_DEVICES"] = str(gpu)
        options = {"num_cpus": 0, "runtime_env": {"env_vars": variables}}
        actors.append(ray.remote(cls).options(**options).remote(setting, *arguments))
    return actors


def _call(actors: Iterable[Any], method: str, *arguments: Any) -> list[Any]:
    import ray

    calls = [getattr(actor, method).remote(*arguments) for actor in actors]
    returned: list[Any] = ray.get(calls, timeout=TIMEOUT_S)
    return returned


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerAddress:
    """What verl's workers ask of the actor around a server."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address = host, int(port)

    async def get_server_address(self) -> tuple[str, int]:
        return self._address

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps


@dataclass
class Replica:
    """A replica for `CheckpointEngineManager`: no requests run, nothing is paused or freed."""

    workers: list[Any]

    async def abort_all_requests(self, reject_request: bool = False) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def resume_generation(self) -> None: ...


def _trainer_class() -> type[Any]:
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register

    class Trainer(Worker):  # type: ignore[misc]
        """What `ActorRolloutRefWorker` does in a sync, with a model under FSDP2."""

        def __init__(self, setting: Setting) -> None:
            super().__init__()
            import verl_sglang_sync.verl_plugin  # noqa: F401
            from verl_sglang_sync.commands.bench.trainers import ShardedModel, dtype_on, size_of

            on_gpu = setting.device == "cuda"
            torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
            self._device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
            torch.manual_seed(self.rank)  # else equal shards hold equal weights
            self._model = ShardedModel(setting.model, self._device)
            self._size = size_of(setting.model, dtype_on(self._device))
            self._engine: Any = None
            self._seconds = 0.0

        def use_backend(self, backend: str | None, bucket_mb: int) -> None:
            from verl.checkpoint_engine import CheckpointEngineRegistry

            self._engine = None
            synchronize_device(self._device)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if backend is not None:
                self._engine = CheckpointEngineRegistry.new(
                    backend, is_master=self.rank == 0, bucket_size=bucket_mb << 20
                )

        @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
        async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
            synchronize_device(self._device)
            started = time.perf_counter()
            metrics = await self._engine.send_weights(self._model.reexport(), global_steps)
            synchronize_device(self._device)
            self._seconds = time.perf_counter() - started
            return metrics or {}

        @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
        def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
            return getattr(self._engine, method)(*args, **kwargs)

        def transfer_seconds(self) -> float:
            return self._seconds

        def advance(self) -> None:
            from benchmarks.arrival import advance

            advance(self._model.shards())
            synchronize_device(self._device)

        def checksums(self) -> dict[str, int]:
            from benchmarks.arrival import checksums

            return checksums(self._model.export())

        def sizes(self) -> dict[str, int]:
            return self._size

    return Trainer


def _worker_class() -> type[Any]:
    from verl.checkpoint_engine.base import CheckpointEngineWorker

    class RolloutWorker(CheckpointEngineWorker):  # type: ignore[misc]
        """verl's worker, with its configuration made here instead of composed by Hydra."""

        def __init__(self, setting: Setting, arm: str, replica: int) -> None:
            import verl_sglang_sync.verl_plugin  # noqa: F401

            self._setting, self._replica = setting, replica
            self.use_arm(arm)

        def use_arm(self, arm: str) -> None:
            """Become the worker that verl makes for this arm."""
            config = Path(self._setting.folder, self._setting.model)
            super().__init__(
                _rollout_config(arm, self._setting),
                _model_config(config),
                replica_rank=self._replica,
            )

    return RolloutWorker


def _rollout_config(arm: str, setting: Setting) -> Any:
    from verl.workers.config import CheckpointEngineConfig, RolloutConfig

    preset = {"request_timeout_s": TIMEOUT_S, **PRESETS.get(arm, {})}
    return RolloutConfig(
        name="sglang",
        mode="async",
        tensor_model_parallel_size=setting.engine_tp,
        checkpoint_engine=CheckpointEngineConfig(
            backend=_backend(arm), update_weights_bucket_megabytes=setting.bucket_mb
        ),
        multi_stage_wake_up=True,
        custom=None if arm == NATIVE else {"weight_sync": preset},
    )


def _model_config(folder: Path) -> Any:
    """The part of verl's `HFModelConfig` that its SGLang adapter reads."""
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    return SimpleNamespace(
        lora={},
        lora_rank=0,
        local_path=str(folder),
        trust_remote_code=False,
        hf_config=SimpleNamespace(model_type=model_type),
    )


if __name__ == "__main__":
    main()
