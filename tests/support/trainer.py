"""Real trainer ranks around the sharding manager: processes with a gloo group, one per TP rank.

    with Ranks(folder, [server.url], tp=2) as ranks:
        ranks.run(lambda rank: rank.sync(rank.weights(0.5), "compiled"))      # results, by rank

What a call leaves in `rank.kept` is there for the next one.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.engine_loaders import HASH_LOADER
from support.hosts import Host
from support.ipc import serialize_handles
from support.remote import Outcome, Remote, finish, results_of
from verl_sglang_sync.engine.server_client import SGLangServerClient, operations

ON_GPUS: Any = {"device": "cuda", "environment": {"NCCL_CUMEM_ENABLE": "0"}}
"""How ranks run on GPUs. SGLang's processes have that variable; a mixture fails."""

CPU = torch.device("cpu")
LIMIT_S = 420  # of calls of a minute or two; the machine may be busy

NamedTensors = list[tuple[str, torch.Tensor]]
Step = Callable[..., Any]


class TrainerRank:
    """One trainer process; the replicas are rows of `tp` consecutive ranks.

    Args:
        rank: of `world_size`.
        world_size: all ranks.
        tp: ranks per replica.
        urls: server of each replica.
        device: of the trainer's tensors, the same as the engine's rank.
        folder: with the checkpoint `model`.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        tp: int,
        urls: Sequence[str],
        device: torch.device,
        folder: Path,
    ) -> None:
        self.rank, self.replica, self.tp = rank, rank // tp, tp
        self.device, self.folder, self.url = device, folder, urls[rank // tp]
        self.kept: dict[Any, Any] = {}
        self.is_leader = rank % tp == 0
        """True on the rank that talks to the replica's server."""
        if dist.is_initialized():
            sizes, names = (world_size // tp, tp), ("dp", "infer_tp")
            self.mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=names)
        self.use_client(self.url, timeout_s=60)

    def use_client(self, url: str, **access: Any) -> None:
        """Talk to the server by this address from now on; arguments as for the client."""
        self.client = SGLangServerClient(url, **access, rank=self.rank, replica=self.replica)

    def weights(self, scale: float = 1.0) -> NamedTensors:
        """The checkpoint's tensors, multiplied."""
        from support.exports import weights_of

        return weights_of(self.folder / "model", self.device, scale=scale)

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

    def hashes(self) -> Hashes:
        folder = self.folder / f"replica{self.replica}"
        folder.mkdir(exist_ok=True)
        return engine_hashes(self, folder)

    def kept_manager(self, mode: str, **settings: Any) -> Any:
        """The same one at every call with these arguments."""
        key = mode, str(settings), id(self.client)
        if key not in self.kept:
            self.kept[key] = self.manager(mode, **settings)
        return self.kept[key]

    def group(self, timeout_s: float = 60) -> Any:
        """This rank's view of the trainer's processes."""
        from verl_sglang_sync.collective import SingleProcess, TorchTrainerGroup

        if not dist.is_initialized():
            return SingleProcess()
        return TorchTrainerGroup(timeout_s=timeout_s, tp_mesh=self.mesh["infer_tp"])

    def close(self) -> None:
        dist.destroy_process_group()


def lone_trainer(url: str, device: torch.device, folder: Path) -> TrainerRank:
    """A trainer of one rank, in the caller's own process."""
    _prepare_process(device)
    return TrainerRank(0, 1, 1, [url], device, folder)


def sync_error(manager: Any, weights: Any, version: str = "v") -> str | None:
    """One sync up to the last word of the engine; the `WeightSyncError` that it raised, or None."""
    from verl_sglang_sync import WeightSyncError

    try:
        asyncio.run(manager.sync(weights, version=version))
        asyncio.run(manager.resume(("kv_cache",)))  # it is resident
    except WeightSyncError as error:
        return str(error)
    return None


def report_of_cycle(manager: Any, weights: Any, version: str) -> dict[str, Any]:
    """A sync between a release and the end of the wake-up; its report."""
    asyncio.run(manager.release())
    asyncio.run(manager.resume(("weights",)))
    asyncio.run(manager.sync(weights, version=version))
    report = asdict(manager.report)
    asyncio.run(manager.resume(("kv_cache",)))
    return report


Hashes = list[dict[str, str]]


def ask_engine(rank: TrainerRank, loader: str, argument: str = "") -> None:
    if rank.is_leader:
        run_loader(rank.client, rank.tp, loader, argument)


def engine_hashes(rank: TrainerRank, folder: Path) -> Hashes:
    ask_engine(rank, HASH_LOADER, str(folder))
    return read_hashes(folder, rank.tp) if rank.is_leader else []


def run_loader(client: Any, tp: int, loader: str, argument: str) -> None:
    """Run one of the tests' loaders (`engine_loaders`, `memory_loaders`) on every TP rank."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    # One tensor for each TP rank, kept until the reply: the first to open a handle consumes it.
    tensors = [torch.zeros(1) for _ in range(tp)]
    handles = [serialize_handles([(argument, tensor)]) for tensor in tensors]
    client.run(operations.update_weights(handles, load_format=loader))


def read_hashes(folder: Path, tp: int) -> Hashes:
    """What `HASH_LOADER` has written there."""
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(tp)]


class Ranks:
    """`tp` trainer ranks for each server in `urls`; a context manager, at whose end they do.

    Args:
        folder: with the checkpoint `model`; gets logs.
        urls: of the servers.
        tp: of each.
        device: "cpu", where ranks are forks, or "cuda".
        environment: of the processes, beside this one's.
        backend: of their group.
        hosts: the n-th rank runs on the n-th of them.
    """

    def __init__(
        self,
        folder: Path,
        urls: Sequence[str],
        *,
        tp: int = 1,
        device: str = "cpu",
        environment: Mapping[str, str] | None = None,
        backend: str = "gloo",
        hosts: Sequence[Host] = (),
    ) -> None:
        size, name = tp * len(urls), os.urandom(4).hex()
        start = partial(_start_rank, size, tp, urls, device, backend, folder)
        self.processes = []
        for rank in range(size):
            command = None if device == "cpu" and not hosts else hosts[rank].prefix if hosts else ()
            there = hosts[rank].environment if hosts else {}
            process = Remote(
                partial(start, folder / f"store-{name}", rank),
                environment={**os.environ, **(environment or {}), **there},
                log=folder / f"trainer-{name}-{rank}.log",
                command=command,
            )
            self.processes.append(process)
        results_of(self.finish(LIMIT_S))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(self, step: Step, *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
        """Call `step(rank, *args)` on all ranks, of which none may fail: results by rank."""
        return results_of(self.attempt(step, *args, limit_s=limit_s))

    def attempt(self, step: Step, *args: Any, limit_s: float = LIMIT_S) -> list[Outcome]:
        """The same; by rank, how it ended."""
        self.begin(step, *args)
        outcomes = self.finish(limit_s)
        for rank in self.hung():  # its threads' stacks go to its log
            os.kill(self.processes[rank].process.pid, 6)
            outcomes[rank] = self.processes[rank].outcome(10)
        errors = {i: f"rank {i} {o.error}" for i, o in enumerate(outcomes) if o and o.error}
        return [Outcome(o and o.result, errors.get(i)) for i, o in enumerate(outcomes)]

    def begin(self, step: Step, *args: Any) -> None:
        """Have all ranks start a call."""
        for process in self.processes:
            process.begin(step, *args)

    def finish(self, limit_s: float) -> list[Outcome | None]:
        """Wait for what `begin` started, by rank; see `remote.finish`."""
        return finish(self.processes, limit_s)

    def hung(self) -> list[int]:
        """Ranks that live and have not answered."""
        return [i for i, each in enumerate(self.processes) if each.is_busy and not each.is_dead]

    @property
    def is_usable(self) -> bool:
        """True if every rank lives and waits for a command."""
        return not any(each.is_busy or each.is_dead for each in self.processes)

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self.processes[rank].kill()

    def end(self) -> None:
        """All ranks end in order, or are killed, where one is busy or dead already."""
        if not self.is_usable:
            self.kill(*range(len(self.processes)))
        for process in self.processes:
            process.link.close()
        for process in self.processes:
            process.end()


def run_trainer(
    step: Step, folder: Path, *args: Any, urls: list[str], timeout_s: float = LIMIT_S, **more: Any
) -> list[Outcome]:
    """Run `step(rank, *args)` on new ranks; arguments as for `Ranks`."""
    with Ranks(folder, urls, **more) as ranks:
        return ranks.attempt(step, *args, limit_s=timeout_s)


def _prepare_process(device: torch.device) -> None:
    """What a trainer's process needs before it syncs."""
    if device.type == "cpu":
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        torch.multiprocessing.set_sharing_strategy("file_system")


def _start_rank(
    size: int,
    tp: int,
    urls: Sequence[str],
    device: str,
    backend: str,
    folder: Path,
    store: Path,
    rank: int,
) -> TrainerRank:
    there = torch.device(device)
    if device != "cpu":
        there = torch.device(device, rank)
        torch.cuda.set_device(there)
    _prepare_process(there)
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    return TrainerRank(rank, size, tp, urls, there, folder)
