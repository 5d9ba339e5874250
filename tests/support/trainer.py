"""Real trainer ranks around the sharding manager: processes with a gloo group, one per TP rank.

A step is a module-level function `step(rank, *args)` of this package (spawned processes import it
by name); what it returns, or its traceback, comes back per rank.
"""

from __future__ import annotations

import asyncio
import json
import os
import pkgutil
import signal
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

from support.engine_loaders import HASH_LOADER
from support.forks import Fork, python_path
from support.hosts import Host
from verl_sglang_sync.engine.server_client import operations

ON_GPUS: Any = {"device": "cuda", "environment": {"NCCL_CUMEM_ENABLE": "0"}}
"""How `run_trainer` runs ranks on GPUs. SGLang's processes have that variable; a mixture fails."""

CPU = torch.device("cpu")


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
        folder: with the checkpoint `model`; engines write what the tests ask them there.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        tp: int,
        urls: list[str],
        device: torch.device,
        folder: Path,
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.rank = rank
        self.replica = rank // tp
        self.tp = tp
        self.device = device
        self.folder = folder
        self.url = urls[self.replica]
        self.mesh = init_device_mesh(
            "cpu", (world_size // tp, tp), mesh_dim_names=("dp", "infer_tp")
        )
        self.use_client(self.url, timeout_s=60)

    def use_client(self, url: str, **access: Any) -> None:
        """Talk to the server by this address from now on; arguments as for the client."""
        from verl_sglang_sync.engine.server_client import SGLangServerClient

        self.client = SGLangServerClient(url, **access, rank=self.rank, replica=self.replica)

    @property
    def is_leader(self) -> bool:
        """True on the rank that talks to the replica's server."""
        return self.rank % self.tp == 0

    def weights(self, scale: float = 1.0) -> NamedTensors:
        """The checkpoint's tensors, multiplied."""
        from support.exports import weights_of

        return weights_of(self.folder / "model", self.device, scale=scale)

    def hashes(self) -> Hashes:
        """Of the engine's own tensors by TP rank; empty but on the leader."""
        folder = self.folder / f"replica{self.replica}"
        folder.mkdir(exist_ok=True)
        return engine_hashes(self, folder)

    def manager(
        self, mode: str, *, multi_stage: bool = True, timeout_s: float = 60, **settings: Any
    ) -> Any:
        """A new sharding manager of this rank; `settings` are keys of the preset."""
        from support.settings import settings_of
        from verl_sglang_sync.sync.sharding_manager import SGLangShardingManager

        settings |= {"request_timeout_s": timeout_s, "multi_stage_wake_up": multi_stage}
        return SGLangShardingManager(
            engine=self.client if self.is_leader else None,
            settings=settings_of(mode, **settings),
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

    def __init__(self, url: str, device: torch.device, folder: Path) -> None:
        prepare_process(device)
        self.rank = self.replica = 0
        self.tp = 1
        self.device = device
        self.folder = folder
        self.url = url
        self.use_client(url, timeout_s=60)

    def group(self, timeout_s: float = 60) -> Any:
        """There is nobody else."""
        from verl_sglang_sync.collective import SingleProcess

        return SingleProcess()


NamedTensors = list[tuple[str, torch.Tensor]]
Hashes = list[dict[str, str]]
"""sha256 by name of each TP rank's tensors."""


def ask_engine(rank: TrainerRank, loader: str, argument: str = "") -> None:
    """Run one of the tests' loaders (`engine_loaders`, `memory_loaders`) on every TP rank."""
    if rank.is_leader:
        run_loader(rank.client, rank.tp, loader, argument, rank.device)


def run_loader(
    client: Any, tp: int, loader: str, argument: str, device: torch.device = CPU
) -> None:
    """The same of any engine."""
    from support.ipc import serialize_handles

    # One tensor for each TP rank, kept until the reply: the first to open a handle consumes it.
    tensors = [torch.zeros(1, device=device) for _ in range(tp)]
    handles = [serialize_handles([(argument, tensor)]) for tensor in tensors]
    client.run(operations.update_weights(handles, load_format=loader))


def engine_hashes(rank: TrainerRank, folder: Path) -> Hashes:
    """Have every TP rank of the engine hash its own tensors; empty on the other ranks."""
    ask_engine(rank, HASH_LOADER, str(folder))
    return read_hashes(folder, rank.tp) if rank.is_leader else []


def read_hashes(folder: Path, tp: int) -> Hashes:
    """What `HASH_LOADER` has written there."""
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(tp)]


def sync_error(manager: Any, weights: Any, version: str = "v") -> str | None:
    """One sync up to the last word of the engine; the `WeightSyncError` that it raised, or None."""
    from verl_sglang_sync import WeightSyncError

    try:
        asyncio.run(manager.sync(weights, version=version))
        asyncio.run(manager.resume(("kv_cache",)))  # it is resident
    except WeightSyncError as error:
        return str(error)
    return None


Step = Callable[..., Any]
TIMEOUT_S = 420  # steps of a minute or two; the machine may be busy
AFTER_CRASH_S = 120  # twice the limit of a sync, within which the other ranks are to notice


def results_of(outcomes: Sequence[Outcome]) -> list[Any]:
    """By rank; none failed."""
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    return [outcome.result for outcome in outcomes]


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
    variables["PYTHONFAULTHANDLER"] = "1"
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
        codes = _wait_for_all(processes, timeout_s)
    finally:
        for process in processes:
            process.kill()
    return [launch.read_outcome(rank, code) for rank, code in enumerate(codes)]


def _wait_for_all(
    processes: Sequence[subprocess.Popen[bytes] | Fork], timeout_s: float
) -> list[int]:
    """Exit codes by rank.

    A rank that still runs at the limit, or `AFTER_CRASH_S` after another one has crashed, is ended
    by a signal for which it leaves its threads' stacks in its log.
    """
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + AFTER_CRASH_S)
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGABRT)
    return [process.wait(timeout=10) for process in processes]


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
        return Path(self.folder, f"outcome-{self.name}-{rank}.json")

    def read_outcome(self, rank: int, code: int) -> Outcome:
        """The outcome of a rank that ended with this code; its log if it died, or left none."""
        if self.outcome_file(rank).exists():
            outcome = msgspec.json.decode(self.outcome_file(rank).read_bytes(), type=Outcome)
            if code >= 0 or outcome.error:
                return outcome
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        log = Path(self.folder, f"trainer-{self.name}-{rank}.log").read_text(errors="replace")
        crash = log.rfind("Fatal Python error")  # the names of all modules come last
        text = log[-4000:] if crash < 0 else log[crash : crash + 8000]
        return Outcome(None, f"rank {rank} {how}:\n{text}")


def prepare_process(device: torch.device) -> None:
    """What a trainer's process needs before it syncs."""
    if device.type == "cpu":
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        torch.multiprocessing.set_sharing_strategy("file_system")


def main(rank: int, launch: Launch) -> None:
    device = torch.device(launch.device)
    if device.type != "cpu":
        device = torch.device(device.type, rank)
        torch.cuda.set_device(device)
    prepare_process(device)
    torch.set_num_threads(1)
    store = f"file://{launch.folder}/store-{launch.name}"
    dist.init_process_group(
        launch.backend, init_method=store, rank=rank, world_size=launch.world_size
    )
    try:
        step = pkgutil.resolve_name(launch.step)
        trainer = TrainerRank(
            rank, launch.world_size, launch.tp, launch.urls, device, Path(launch.folder)
        )
        outcome = Outcome(step(trainer, *launch.args), None)
    except Exception:
        outcome = Outcome(None, traceback.format_exc())
    launch.outcome_file(rank).write_bytes(msgspec.json.encode(outcome))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), msgspec.json.decode(sys.argv[2].encode(), type=Launch))
