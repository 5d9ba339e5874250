"""Disaggregated syncs as verl 0.9.1 drives them: real Ray, its checkpoint engines and workers.

A trainer actor on GPU 0 holds the weights and a checkpoint engine; verl's own
`CheckpointEngineWorker` is on GPU 1 beside the server. Arms: `verl_nccl` is verl's backend `nccl`
(the trainer's buckets go over NCCL to that worker, and on to SGLang as named tensors over CUDA
IPC); `verl_disaggregated` is ours, `sglang_sync` in mode compiled, on the same path. A sync is
`CheckpointEngineManager.update_weights`; pausing generation and freeing the KV cache, which both
backends pay alike, are left out.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.arm import (
    ENGINE_GPU,
    TRAINER_GPU,
    Seconds,
    checksums_of_engine,
    child_arguments,
    measure_arm,
    run_arms,
    synchronize,
)
from verl_sglang_sync.bench.engine_server import wait_until_healthy

VERL_ARMS = {"verl_nccl": "nccl", "verl_disaggregated": "sglang_sync"}
TIMEOUT_S = 90.0
PRESET = {"mode": "compiled", "request_timeout_s": TIMEOUT_S}


def main() -> None:
    """Start Ray and the trainer, and measure."""
    args = child_arguments(__doc__.splitlines()[0])
    if args.device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
    import ray

    import verl_sglang_sync.verl_plugin  # noqa: F401  registers our backend, and verl's CPU platform

    ray.init(num_cpus=8, num_gpus=2, include_dashboard=False, log_to_driver=True)
    try:
        cluster = Cluster(args)
        wait_until_healthy(args.url, args.server_log)
        run_arms(args.arms, args.rows, lambda arm: _measure(arm, cluster, args))
    finally:
        ray.shutdown()


def _measure(arm: str, cluster: Cluster, args: Any) -> dict[str, Any]:
    import ray

    backend = VERL_ARMS[arm]
    _check_backend(backend)
    trainer = cluster.trainer
    ray.get(trainer.use_backend.remote(backend, args.bucket_mb), timeout=TIMEOUT_S)
    sync = cluster.sync_with(backend)
    row = measure_arm(
        arm,
        runs=args.runs,
        device=args.device,
        sync=sync,
        advance=lambda: ray.get(trainer.advance.remote(), timeout=TIMEOUT_S),
        trainer_checksums=lambda: ray.get(trainer.checksums.remote(), timeout=TIMEOUT_S),
        held_by_engine=checksums_of_engine(args.url, args.folder),
    )
    ray.get(trainer.use_backend.remote(None, args.bucket_mb), timeout=TIMEOUT_S)
    sent = ray.get(trainer.sizes.remote(), timeout=TIMEOUT_S)
    return {**row, "model": args.model, **sent}


def _check_backend(backend: str) -> None:
    """Raises verl's own error, with the reason, where the backend could not be imported."""
    from verl.checkpoint_engine import CheckpointEngineRegistry

    CheckpointEngineRegistry.get(backend)


class Cluster:
    """The trainer actor, the actor that stands for the server's, and a worker for each backend."""

    def __init__(self, args: Any) -> None:
        import ray

        host, port = args.url.removeprefix("http://").split(":")
        self.trainer = _start(
            _trainer_class(), TRAINER_GPU, 1.0, model=args.model, device=args.device
        )
        ray.get(self.trainer.sizes.remote(), timeout=240)  # it has taken the first GPU
        server = ray.remote(num_cpus=0)(ServerAddress).options(name="sglang_server_0_0")
        self._server = server.remote(host, int(port))  # kept: it ends with its last handle
        self._workers: dict[str, Any] = {}
        self._bucket_mb = args.bucket_mb
        self._config = args.folder / args.model

    def sync_with(self, backend: str) -> Any:
        """One sync through verl's manager, as a function."""
        import ray
        from verl.checkpoint_engine.base import CheckpointEngineManager
        from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
        from verl.workers.config import CheckpointEngineConfig

        worker = self._worker(backend)
        seconds: dict[str, float] = {}

        class TimedManager(CheckpointEngineManager):  # type: ignore[misc]
            def build_process_group(self, rollout: Any) -> None:
                started = time.perf_counter()
                super().build_process_group(rollout)
                seconds["group"] = time.perf_counter() - started

        group = RayWorkerGroup(
            worker_handles=[self.trainer],
            ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(_trainer_class())),
        )
        config = CheckpointEngineConfig(
            backend=backend, update_weights_bucket_megabytes=self._bucket_mb
        )
        manager = TimedManager(config, group, [OneReplica([worker])])
        step = 0

        def sync() -> Seconds:
            nonlocal step
            step += 1
            seconds.clear()
            started = time.perf_counter()
            manager.update_weights(global_steps=step)
            seconds["sync"] = time.perf_counter() - started
            seconds["transfer"] = ray.get(self.trainer.transfer_seconds.remote())
            return dict(seconds)

        return sync

    def _worker(self, backend: str) -> Any:
        import ray

        if backend not in self._workers:
            worker = _start(
                _worker_class(),
                ENGINE_GPU,
                0.5,
                backend=backend,
                bucket_mb=self._bucket_mb,
                config=self._config,
            )
            ray.get(worker.get_replica_rank.remote(), timeout=240)
            self._workers[backend] = worker
        return self._workers[backend]


def _start(cls: type[Any], gpu: int, share: float, **arguments: Any) -> Any:
    """An actor with the environment that verl's `RayWorkerGroup` gives a group of one worker."""
    import ray

    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "RAY_LOCAL_WORLD_SIZE": "1",
        "WG_BACKEND": "ray",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    options = {"num_gpus": share, "num_cpus": 1, "runtime_env": {"env_vars": environment}}
    return ray.remote(cls).options(**options).remote(gpu=gpu, **arguments)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerAddress:
    """What verl's workers ask of the actor around a server."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port

    async def get_server_address(self) -> tuple[str, int]:
        return self._address

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps


@dataclass
class OneReplica:
    """A replica for `CheckpointEngineManager`: no requests run, nothing is paused or freed."""

    workers: list[Any]

    async def abort_all_requests(self, reject_request: bool = False) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def resume_generation(self) -> None: ...


def _expect_gpu(gpu: int) -> None:
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available() and seen != str(gpu):
        raise RuntimeError(f"Ray gave this actor CUDA_VISIBLE_DEVICES={seen!r}, expected {gpu}")


def _trainer_class() -> type[Any]:
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register

    class Trainer(Worker):  # type: ignore[misc]
        """What `ActorRolloutRefWorker` does in a sync, with a model under FSDP2 with one rank."""

        def __init__(self, gpu: int, model: str, device: str) -> None:
            super().__init__()
            import verl_sglang_sync.verl_plugin  # noqa: F401
            from verl_sglang_sync.bench.trainers import ShardedModel, size_of

            _expect_gpu(gpu)
            self._device = device
            torch.distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
            )
            place = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
            self._model = ShardedModel(model, place)
            self._size = size_of(model, place)
            self._engine: Any = None
            self._seconds = 0.0

        def use_backend(self, backend: str | None, bucket_mb: int) -> None:
            from verl.checkpoint_engine import CheckpointEngineRegistry

            self._engine = None
            synchronize(self._device)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if backend is not None:
                self._engine = CheckpointEngineRegistry.new(
                    backend, is_master=True, bucket_size=bucket_mb << 20
                )

        @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
        async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
            synchronize(self._device)
            started = time.perf_counter()
            metrics = await self._engine.send_weights(self._model.reexport(), global_steps)
            synchronize(self._device)
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
            synchronize(self._device)

        def checksums(self) -> dict[str, int]:
            from benchmarks.arrival import checksums

            return checksums(self._model.export())

        def sizes(self) -> dict[str, int]:
            num_tensors, num_bytes = self._size
            return {"num_tensors": num_tensors, "bytes": num_bytes}

    return Trainer


def _worker_class() -> type[Any]:
    from verl.checkpoint_engine.base import CheckpointEngineWorker

    class RolloutWorker(CheckpointEngineWorker):  # type: ignore[misc]
        """verl's worker, with its configuration made here instead of composed by Hydra."""

        def __init__(self, gpu: int, backend: str, bucket_mb: int, config: Path) -> None:
            import verl_sglang_sync.verl_plugin  # noqa: F401

            _expect_gpu(gpu)
            super().__init__(
                _rollout_config(backend, bucket_mb), _model_config(config), replica_rank=0
            )

    return RolloutWorker


def _rollout_config(backend: str, bucket_mb: int) -> Any:
    from verl.workers.config import CheckpointEngineConfig, RolloutConfig

    return RolloutConfig(
        name="sglang",
        mode="async",
        tensor_model_parallel_size=1,
        checkpoint_engine=CheckpointEngineConfig(
            backend=backend, update_weights_bucket_megabytes=bucket_mb
        ),
        multi_stage_wake_up=True,
        custom={"weight_sync": PRESET} if backend == "sglang_sync" else None,
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
