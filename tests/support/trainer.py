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
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.hosts import Host
from support.remote import Outcome, Remote, finish, results_of
from verl_sglang_sync.engine.server_client.client import SGLangServerClient

ON_GPUS: Any = {"device": "cuda", "environment": {"NCCL_CUMEM_ENABLE": "0"}}
"""How ranks run on GPUs. SGLang's processes have that variable; a mixture fails."""

CPU = torch.device("cpu")
LIMIT_S = 420  # of calls of a minute or two; the machine may be busy

NamedTensors = list[tuple[str, torch.Tensor]]
Hashes = list[dict[str, str]]
"""sha256 by name of each TP rank's tensors."""

Step = Callable[..., Any]


@dataclass
class TrainerRank:
    """One trainer process; the replicas are rows of `tp` consecutive ranks.

    Attributes:
        urls: server of each replica.
        tp: ranks per replica.
        device: of the trainer's tensors, the same as the engine's rank.
        folder: with the checkpoint `model`.
        rank: of all.
        kept: what a call leaves for the next one.
    """

    urls: Sequence[str]
    tp: int
    device: torch.device
    folder: Path
    rank: int = 0
    kept: dict[Any, Any] = field(default_factory=dict)

    def start(self, backend: str | None = None, store: Path | None = None) -> TrainerRank:
        """Have this process be the rank; with a `backend` it meets the others in the file `store`,
        else there are none.
        """
        if self.device.type == "cpu":
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
            torch.multiprocessing.set_sharing_strategy("file_system")
        if backend is not None:
            if self.device.type != "cpu":
                torch.cuda.set_device(self.device)
            torch.set_num_threads(1)
            size, meet = len(self.urls) * self.tp, f"file://{store}"
            dist.init_process_group(backend, init_method=meet, rank=self.rank, world_size=size)
            sizes, names = (len(self.urls), self.tp), ("dp", "infer_tp")
            self.mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=names)
        self.use_client(self.url, timeout_s=60)
        return self

    @property
    def replica(self) -> int:
        return self.rank // self.tp

    @property
    def url(self) -> str:
        """Of the replica's server."""
        return self.urls[self.replica]

    @property
    def is_leader(self) -> bool:
        """True on the rank that talks to the replica's server."""
        return self.rank % self.tp == 0

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
            ranks=self.ranks(timeout_s),
            device=self.device,
            replica=self.replica,
        )

    def kept_manager(self, mode: str, **settings: Any) -> Any:
        """The same one at every call with these arguments."""
        key = mode, str(settings), id(self.client)
        if key not in self.kept:
            self.kept[key] = self.manager(mode, **settings)
        return self.kept[key]

    def ranks(self, timeout_s: float = 60) -> Any:
        """This rank's view of the trainer's processes."""
        from verl_sglang_sync.trainer_ranks import TrainerRanks

        if not dist.is_initialized():
            return TrainerRanks()
        return TrainerRanks(timeout_s=timeout_s, tp_mesh=self.mesh["infer_tp"])

    def close(self) -> None:
        dist.destroy_process_group()


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


def read_hashes(folder: Path, tp: int) -> Hashes:
    """What `HASH_LOADER` has written there last."""
    return [hashes_of_models(folder, rank)[-1] for rank in range(tp)]


def hashes_of_models(folder: Path, rank: int = 0) -> Hashes:
    """The same, of all models of one rank, the target after its draft."""
    return [json.loads(line) for line in (folder / f"rank{rank}.json").read_text().splitlines()]


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
        name, self.processes = os.urandom(4).hex(), []
        for i in range(tp * len(urls)):
            there = hosts[i] if hosts else None
            where = torch.device(device) if device == "cpu" else torch.device(device, i)
            rank = TrainerRank(urls, tp, where, folder, i)
            process = Remote(
                partial(rank.start, backend, folder / f"store-{name}"),
                environment={
                    **os.environ,
                    **(environment or {}),
                    **(there.environment if there else {}),
                },
                log=folder / f"trainer-{name}-{i}.log",
                command=there.prefix if there else None if device == "cpu" else (),
            )
            self.processes.append(process)
        try:
            results_of(self.finish(LIMIT_S))
        except BaseException:
            self.end()
            raise

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
