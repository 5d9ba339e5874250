"""A served tiny model, and trainers for it: what most end-to-end tests start with."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tiny_assets import make_assets

from sglang_loader.common.engine_settings import HostBackup
from support.engine_loaders import HASH_LOADER
from support.forks import CPU_ENVIRONMENT, Fork, python_path, serve
from support.ipc import ask_engine
from support.trainer import CPU, Hashes, Ranks, TrainerRank, read_hashes
from verl_sglang_sync.commands.bench.engine_server import engine_server, launch
from verl_sglang_sync.engine.server_client import operations
from verl_sglang_sync.engine.server_client.client import SGLangServerClient

SMALL = ("--max-total-tokens", "1024", "--max-running-requests", "4")


@dataclass(frozen=True)
class Served:
    """The server of the checkpoint `folder/model`.

    Attributes:
        url: where it listens.
        process: a fork, or `subprocess.Popen`; it leads a process group.
        log_file: of its output; what it is asked for is in the same folder.
        folder: with the checkpoint.
        tp: ranks of the engine.
        access: its keys.
    """

    url: str
    process: Any
    log_file: Path
    folder: Path
    tp: int
    access: Mapping[str, str] = field(default_factory=dict)

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def version(self) -> str:
        """That the engine publishes."""
        client = SGLangServerClient(self.url, timeout_s=60, **self.access)
        version: str = client.run(operations.model_info())["weight_version"]
        return version

    @property
    def schedulers(self) -> list[int]:
        """The engine's processes that load weights and compute, one for each TP rank."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        found = [child.pid for child in children if "scheduler" in " ".join(child.cmdline())]
        assert len(found) == self.tp, [child.cmdline() for child in children]
        return found

    def ask(self, loader: str, argument: str = "", limit_s: float = 60) -> None:
        """Run one of the tests' loaders (`engine_loaders`, `memory_loaders`) on every TP rank."""
        client = SGLangServerClient(self.url, timeout_s=limit_s, **self.access)
        ask_engine(client, self.tp, loader, argument)

    def hashes(self, limit_s: float = 60) -> Hashes:
        """Of the engine's own tensors, taken in its processes, by TP rank."""
        folder = self.log_file.parent
        for file in folder.glob("rank*.json"):
            file.unlink()
        self.ask(HASH_LOADER, str(folder), limit_s)
        return read_hashes(folder, self.tp)

    def trainer(self, device: Any = CPU) -> TrainerRank:
        """A trainer of one rank, in this process."""
        return TrainerRank([self.url], self.tp, device, self.folder).start()

    def ranks(self, **more: Any) -> Ranks:
        """New trainer processes, one for each TP rank; arguments as for `Ranks`."""
        return Ranks(self.folder, [self.url], tp=self.tp, **more)


def environment(device: str, tp: int) -> dict[str, str]:
    """Environment of an engine with `tp` ranks on "cpu" or "cuda"."""
    common = {**os.environ, "PYTHONPATH": python_path(), "PYTHONFAULTHANDLER": "1"}
    if device != "cpu":
        return common
    cores = "|".join(str(rank) for rank in range(tp))
    return {**common, **CPU_ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND": cores}


@contextmanager
def served(
    folder: Path,
    *,
    tp: int = 1,
    model: Path | None = None,
    access: Mapping[str, str] | None = None,
    architecture: str = "qwen3",
    tied: bool = False,
    device: str = "cpu",
    loaders: tuple[str, ...] = (),
    extra: tuple[str, ...] = (),
    host_backup: HostBackup = "on",
    variables: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
    warms_up: bool = False,
) -> Iterator[Served]:
    """Serve a tiny model of random weights until the block ends; on a CPU the server is a fork.

    Args:
        folder: gets the log, and the model where there is none.
        tp: ranks of the engine.
        model: the checkpoint, if it is not `folder/model`.
        access: keys of the server.
        architecture: of a model that is made; likewise `tied`.
        loaders: further ones that the test asks for.
        extra: more of SGLang's arguments.
        variables: of its environment.
        host: address that it listens at.
        warms_up: SGLang sends itself a request before it is healthy, as it does by default.
    """
    folder.mkdir(exist_ok=True)
    if model is None and not (folder / "model").exists():
        make_assets(folder, architecture=architecture, tied=tied)
    processes: list[Any] = []

    def start(arguments: list[str], environment: Mapping[str, str], log: Path) -> Any:
        if warms_up:
            arguments.remove("--skip-server-warmup")
        if device == "cpu":
            processes.append(Fork(serve, *arguments, environment=environment, log=log))
        else:
            processes.append(launch(arguments, environment, log))
        return processes[0]

    if device == "cpu" and "--enable-dp-attention" not in extra:  # whose schedulers wait for all
        extra = ("--sleep-on-idle", *extra)  # two idle servers would keep two cores busy
    model, log = model or folder / "model", folder / "server.log"
    with engine_server(
        model,
        device=device,
        host_backup=host_backup,
        is_moe=False,
        log=log,
        tp=tp,
        gpu_share=0.3,
        loaders=(HASH_LOADER, *loaders),
        environment={**environment(device, tp), **(variables or {})},
        host=host,
        extra=(*SMALL, *extra),
        start=start,
    ) as url:
        yield Served(url, processes[0], log, model.parent, tp, access or {})
