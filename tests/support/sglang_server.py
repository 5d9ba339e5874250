"""A real SGLang HTTP server in its own process group, launched with our loaders."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_loader.common.engine_settings import HOST_BACKUP_VARIABLE, HostBackup
from sglang_loader.common.session.messages import SESSION_FORMAT
from support.engine_loaders import HASH_LOADER
from support.forks import CPU_ENVIRONMENT, Fork, die_with_parent, python_path, serve
from verl_sglang_sync.bench.engine_server import wait_until_healthy
from verl_sglang_sync.engine.server_client.operations import server_url


@dataclass(frozen=True)
class Server:
    """Where the server listens and what it logs."""

    url: str
    log: Path
    process: subprocess.Popen[bytes] | Fork


CPU_ARGUMENTS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--disable-overlap-schedule", "--mem-fraction-static", "0.1", "--disable-cuda-graph"),
)
GPU_ARGUMENTS = (
    *("--dtype", "bfloat16", "--attention-backend", "triton", "--mem-fraction-static", "0.3"),
    *("--enable-memory-saver", "--enable-weights-cpu-backup", "--cuda-graph-max-bs", "4"),
    "--disable-prefill-cuda-graph",  # decoding has graphs; those of prefill take a minute
)


def environment(device: str, tp: int) -> dict[str, str]:
    """Environment of an engine with `tp` ranks on "cpu" or "cuda"."""
    common = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": python_path()}
    common["PYTHONFAULTHANDLER"] = "1"
    if device != "cpu":
        return common
    cores = "|".join(str(rank) for rank in range(tp))
    return {**common, **CPU_ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND": cores}


@contextlib.contextmanager
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
    port = free_port()
    arguments = [
        *("--model-path", str(model), "--host", host, "--port", str(port), "--tp-size", str(tp)),
        *("--sampling-backend", "pytorch", "--skip-server-warmup"),
        *("--max-total-tokens", "1024", "--max-running-requests", "4"),
        *(CPU_ARGUMENTS if device == "cpu" else GPU_ARGUMENTS),
        *("--custom-weight-loader", SESSION_FORMAT, HASH_LOADER, *loaders),
        *extra,
    ]
    if device == "cpu" and "--enable-dp-attention" not in extra:  # whose schedulers wait for all
        arguments.append("--sleep-on-idle")  # two idle servers would keep two cores busy
    log = folder / "server.log"
    variables = {
        **environment(device, tp),
        HOST_BACKUP_VARIABLE: host_backup,
        **(variables or {}),
    }
    process: subprocess.Popen[bytes] | Fork
    if device == "cpu":
        process = Fork(serve, *arguments, environment=variables, log=log)
    else:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *arguments],
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
    server = Server(server_url(host, port), log, process)
    try:
        wait_until_healthy(server.url, log, is_running=lambda: process.poll() is None)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def loopback() -> str:
    """The loopback address: IPv6's where this host has one."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return "127.0.0.1"
    return "::1"


def free_port() -> int:
    """A free port that leaves room above: SGLang derives others from it, the farthest + 10000."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port between 20000 and 30000")
