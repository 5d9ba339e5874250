"""A real SGLang HTTP server in its own process group, with the tests' loaders; on a CPU, a fork."""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_loader.common.engine_settings import HostBackup
from support.engine_loaders import HASH_LOADER
from support.forks import CPU_ENVIRONMENT, Fork, python_path, serve
from verl_sglang_sync.bench.engine_server import engine_server, launch

SMALL = ("--max-total-tokens", "1024", "--max-running-requests", "4")


@dataclass(frozen=True)
class Server:
    """Where the server listens and what it logs; `process`: a fork, or `subprocess.Popen`."""

    url: str
    log: Path
    process: Any


def environment(device: str, tp: int) -> dict[str, str]:
    """Environment of an engine with `tp` ranks on "cpu" or "cuda"."""
    common = {**os.environ, "PYTHONPATH": python_path(), "PYTHONFAULTHANDLER": "1"}
    if device != "cpu":
        return common
    cores = "|".join(str(rank) for rank in range(tp))
    return {**common, **CPU_ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND": cores}


@contextmanager
def sglang_server(
    model: Path,
    folder: Path,
    *,
    tp: int = 1,
    device: str = "cpu",
    loaders: tuple[str, ...] = (),
    extra: tuple[str, ...] = (),
    host_backup: HostBackup = "on",
    variables: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
) -> Iterator[Server]:
    """Serve `model` until the block ends; the log goes to `folder/server.log`.

    `loaders` are further ones that the test asks for.
    """
    processes: list[Any] = []

    def start(arguments: list[str], environment: Mapping[str, str], log: Path) -> Any:
        if device == "cpu":
            processes.append(Fork(serve, *arguments, environment=environment, log=log))
        else:
            processes.append(launch(arguments, environment, log))
        return processes[0]

    if device == "cpu" and "--enable-dp-attention" not in extra:  # whose schedulers wait for all
        extra = ("--sleep-on-idle", *extra)  # two idle servers would keep two cores busy
    log = folder / "server.log"
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
        yield Server(url, log, processes[0])


def loopback() -> str:
    """The loopback address: IPv6's where this host has one."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return "127.0.0.1"
    return "::1"
