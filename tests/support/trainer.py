"""Real trainer ranks around the sharding manager: processes with a gloo group, one per TP rank.

A step is a module-level function `step(rank, *args)` of this package (spawned processes import it
by name); what it returns, or its traceback, comes back per rank.
"""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from support.forks import Fork, python_path
from support.hosts import Host
from verl_sglang_sync.engine.server_client import operations

ON_GPUS = {"NCCL_CUMEM_ENABLE": "0"}
"""Environment of trainer ranks on GPUs: what SGLang's processes have; a mixture fails in CUDA."""


@dataclass(frozen=True)
class Outcome:
    """What one rank's step came to: its result, or its traceback."""

    result: Any
    error: str | None


class TrainerRank:
    """One trainer process; the replicas are rows of `tp` consecutive ranks.

    Args:
        rank: of `world_size`.
        world_size: all ranks.
        tp: ranks per replica.
        urls: server of each replica.
        device: of the trainer's tensors, the same as the engine's rank.
    """

    def __init__(
        self, rank: int, world_size: int, tp: int, urls: list[str], device: torch.device
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        from verl_sglang_sync.engine.server_client import SGLangServerClient

        self.rank = rank
        self.replica = rank // tp
        self.tp = tp
        self.device = device
        self.url = urls[self.replica]
        self.mesh = init_device_mesh(
            "cpu", (world_size // tp, tp), mesh_dim_names=("dp", "infer_tp")
        )
        self.client = SGLangServerClient(self.url, timeout_s=60)

    @property
    def is_leader(self) -> bool:
        """True on the rank that talks to the replica's server."""
        return self.rank % self.tp == 0

    def manager(
        self,
        mode: str,
        *,
        bucket_bytes: int = 64 << 10,
        multi_stage: bool = True,
        timeout_s: float = 60,
        **settings: Any,
    ) -> Any:
        """A new sharding manager of this rank; `settings` are keys of the preset."""
        from verl_sglang_sync.config import WeightSyncConfig
        from verl_sglang_sync.sync.sharding_manager import SGLangShardingManager

        return SGLangShardingManager(
            engine=self.client if self.is_leader else None,
            settings=WeightSyncConfig(
                mode=mode,  # type: ignore[arg-type]
                request_timeout_s=timeout_s,
                **settings,
                bucket_bytes=bucket_bytes,
                multi_stage_wake_up=multi_stage,
                free_cache_engine=True,
            ),
            group=self.group(timeout_s),
            device=self.device,
            replica=self.replica,
        )

    def group(self, timeout_s: float = 60) -> Any:
        """This rank's view of the trainer's processes."""
        from verl_sglang_sync.collective import TorchTrainerGroup

        return TorchTrainerGroup(timeout_s=timeout_s, tp_mesh=self.mesh["infer_tp"])


class LoneTrainer(TrainerRank):
    """A trainer of one rank, in the caller's own process."""

    def __init__(self, url: str, device: torch.device) -> None:
        from verl_sglang_sync.engine.server_client import SGLangServerClient

        self.rank = self.replica = 0
        self.tp = 1
        self.device = device
        self.url = url
        self.client = SGLangServerClient(url, timeout_s=60)

    def group(self, timeout_s: float = 60) -> Any:
        """There is nobody else."""
        from verl_sglang_sync.collective import SingleProcess

        return SingleProcess()


NamedTensors = list[tuple[str, torch.Tensor]]


def engine_hashes(rank: TrainerRank, folder: Path) -> list[dict[str, str]]:
    """Have every TP rank of the engine hash its own tensors; empty on the other ranks."""
    from support.engine_hash import HASH_LOADER
    from support.ipc import serialize_handles

    if not rank.is_leader:
        return []
    # One tensor for each TP rank, kept until the reply: the first to open a handle consumes it.
    tensors = [torch.zeros(1, device=rank.device) for _ in range(rank.tp)]
    handles = [serialize_handles([(str(folder), tensor)]) for tensor in tensors]
    rank.client.run(operations.update_weights(handles, load_format=HASH_LOADER))
    return [json.loads((folder / f"rank{tp}.json").read_text()) for tp in range(rank.tp)]


Step = Callable[..., Any]
TIMEOUT_S = 420  # steps of a minute or two; the machine may be busy


def run_trainer(
    step: Step,
    folder: Path,
    *args: Any,
    urls: list[str],
    tp: int = 1,
    device: str = "cpu",
    environment: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    backend: str = "gloo",
    hosts: Sequence[Host] = (),
) -> list[Outcome]:
    """Run `step(rank, *args)` on `tp` ranks for each server in `urls`; args must suit JSON.

    With `hosts`, the n-th rank runs on the n-th of them.

    Each is a process of its own, on this machine's CPU a fork.
    """
    world_size = tp * len(urls)
    name = os.urandom(4).hex()
    launch = Launch(
        step=f"{step.__module__}:{step.__name__}",
        args=list(args),
        world_size=world_size,
        tp=tp,
        urls=urls,
        folder=str(folder),
        name=name,
        device=device,
        backend=backend,
    )
    variables = {**os.environ, **(environment or {}), "PYTHONPATH": python_path()}
    processes: list[subprocess.Popen[bytes] | Fork] = []
    for rank in range(world_size):
        log = folder / f"trainer-{name}-{rank}.log"
        if device == "cpu" and not hosts:
            processes.append(Fork(main, rank, launch, environment=variables, log=log))
            continue
        there = hosts[rank] if hosts else None
        command = [*(there.prefix if there else ()), sys.executable, "-m", "support.trainer"]
        with log.open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [*command, str(rank), msgspec.json.encode(launch).decode()],
                    env={**variables, **(there.environment if there else {})},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        deadline = time.monotonic() + timeout_s
        for process in processes:
            process.wait(timeout=max(1.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
    return [launch.read_outcome(rank) for rank in range(world_size)]


class Launch(msgspec.Struct, kw_only=True):
    """Everything a rank's process needs to know."""

    step: str
    args: list[Any]
    world_size: int
    tp: int
    urls: list[str]
    folder: str
    name: str
    device: str
    backend: str

    def outcome_file(self, rank: int) -> Path:
        """Where a rank leaves its outcome."""
        return Path(self.folder, f"outcome-{self.name}-{rank}.json")

    def read_outcome(self, rank: int) -> Outcome:
        """The outcome of a finished rank; its log where it left none."""
        if not self.outcome_file(rank).exists():
            log = Path(self.folder, f"trainer-{self.name}-{rank}.log")
            return Outcome(None, log.read_text(errors="replace")[-4000:])
        return msgspec.json.decode(self.outcome_file(rank).read_bytes(), type=Outcome)


def main(rank: int, launch: Launch) -> None:
    """One rank's process."""
    device = torch.device(launch.device)
    if device.type == "cpu":
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        torch.multiprocessing.set_sharing_strategy("file_system")
    else:
        device = torch.device(device.type, rank)
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    store = f"file://{launch.folder}/store-{launch.name}"
    dist.init_process_group(
        launch.backend, init_method=store, rank=rank, world_size=launch.world_size
    )
    try:
        step = pkgutil.resolve_name(launch.step)
        trainer = TrainerRank(rank, launch.world_size, launch.tp, launch.urls, device)
        outcome = Outcome(step(trainer, *launch.args), None)
    except Exception:
        outcome = Outcome(None, traceback.format_exc())
    launch.outcome_file(rank).write_bytes(msgspec.json.encode(outcome))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), msgspec.json.decode(sys.argv[2].encode(), type=Launch))
