"""An SGLang HTTP server with our loaders, for benchmarks (dummy weights of a shape) and tests."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sglang_loader.common.engine_settings import HOST_BACKUP_VARIABLE, HostBackup
from sglang_loader.common.session.messages import SESSION_FORMAT
from verl_sglang_sync.http_settings import server_url

START_TIMEOUT_S = 600  # the first start with flashinfer compiles its kernels: 4 minutes
PR_SET_PDEATHSIG = 1  # prctl(2)
NCCL_PORT_OFFSET = 5000
"""The distance from the server's port to the port of its process group. By default SGLang takes a
port that Linux assigns, and binds it only a second later.
"""
SCHEDULER_ENDED = "Received sigquit from a child process"
"""SGLang's log line for the end of one of its ranks. The server itself may go on."""

DUMMY = (
    *("--load-format", "dummy", "--skip-tokenizer-init", "--max-running-requests", "16"),
    *("--context-length", "2048", "--max-total-tokens", "4096"),
)
CPU = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--disable-overlap-schedule", "--mem-fraction-static", "0.1", "--disable-cuda-graph"),
    *("--sampling-backend", "pytorch"),
)
GPU = (
    # As verl launches it. Sampling backend and prefill CUDA graphs are SGLang's defaults.
    *("--dtype", "bfloat16", "--attention-backend", "flashinfer", "--enable-memory-saver"),
    "--enable-weights-cpu-backup",
    *("--cuda-graph-max-bs-decode", "4"),  # fewer sizes of decode graphs than by default
)


Start = Callable[[list[str], Mapping[str, str], Path], Any]
"""Function that starts a server, given arguments, environment and log. Returns an object like
`Popen`."""


def launch(arguments: list[str], environment: Mapping[str, str], log: Path) -> Any:
    """Start `python -m sglang.launch_server` in a process group of its own."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *arguments],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


@contextlib.contextmanager
def engine_server(
    config: Path,
    *,
    device: str,
    host_backup: HostBackup,
    is_moe: bool,
    log: Path,
    tp: int = 1,
    first_gpu: int = 0,
    gpu_share: float = 0.55,
    loaders: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    wait: bool = True,
    host: str = "127.0.0.1",
    extra: tuple[str, ...] = DUMMY,
    start: Start = launch,
) -> Iterator[str]:
    """Serve a model while the body runs. Yields the server's URL.

    Args:
        config: folder with the model's `config.json`.
        device: "cpu" or a GPU.
        host_backup: see `engine_settings`.
        is_moe: True if the model has experts.
        log: file for the server's output.
        tp: number of TP ranks.
        first_gpu: number of the first rank's GPU.
        gpu_share: SGLang's `--mem-fraction-static`.
        loaders: custom weight loaders besides ours.
        environment: variables in addition to this process's own.
        wait: False to yield before the server is healthy (see `wait_until_healthy`).
        host: address at which the server listens.
        extra: further arguments, which override those of this function.
        start: function that starts the server's process.
    """
    reservation, is_on_gpu = reserved_port(), device != "cpu"
    port = reservation.getsockname()[1]
    arguments = [
        *("--model-path", str(config), "--host", host, "--port", str(port), "--tp-size", str(tp)),
        *("--nccl-port", str(port + NCCL_PORT_OFFSET)),
        *("--skip-server-warmup", *(GPU if is_on_gpu else CPU)),
        *("--custom-weight-loader", SESSION_FORMAT, *loaders),
    ]
    if is_on_gpu:
        arguments += ["--mem-fraction-static", str(gpu_share), "--base-gpu-id", str(first_gpu)]
        arguments += ["--moe-runner-backend", "triton"] if is_moe else []
    arguments += extra
    common = {**os.environ, "HF_HUB_OFFLINE": "1", HOST_BACKUP_VARIABLE: host_backup}
    if not is_on_gpu:
        cores = "|".join(str(rank) for rank in range(tp))
        common |= {"SGLANG_CPU_OMP_THREADS_BIND": cores, "SGLANG_NCCL_SO_PATH": "/nonexistent"}
    process = start(arguments, {**common, **(environment or {})}, log)
    try:
        url = server_url(host, port)
        if wait:
            wait_until_healthy(url, log, process)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # the process may not lead its group yet
        process.wait()
        reservation.close()


def _die_with_parent() -> None:
    """Ask the kernel to kill this process, a child, when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_until_healthy(url: str, log: Path, process: Any = None) -> None:
    """Wait until the server answers.

    Args:
        process: the server's process if it is a child of this process, an object like `Popen`.

    Raises:
        RuntimeError: the server ended, or is not healthy in time. The message has the end of the
            log.
    """

    def logged() -> str:
        return log.read_text(errors="replace") if log.exists() else ""

    def may_come_up() -> bool:
        # The log shows the end of a server that is no child of this process, too.
        is_running = process is None or process.poll() is None
        return is_running and SCHEDULER_ENDED not in logged()

    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and may_come_up():
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    failure = f"did not start within {START_TIMEOUT_S} s" if may_come_up() else "ended at its start"
    raise RuntimeError(f"SGLang {failure}:\n{logged()[-4000:]}")


def reserved_port() -> socket.socket:
    """Return a socket at a free port from which SGLang can derive its other ports.

    No other call gets the port until the socket is closed. SGLang's server can listen at it.
    """
    # SGLang's farthest port is this one + 10000. Linux assigns ports from 32768 on to processes
    # that name none.
    for port in random.sample(range(20000, 22700), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            # Without SO_REUSEADDR this fails at a port that is reserved or in use.
            probe.bind(("127.0.0.1", port))
            probe.close()
            reservation = socket.socket()
            # SGLang's server sets this, too. It listens, and the reservation does not.
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reservation.bind(("127.0.0.1", port))
            return reservation
    raise RuntimeError("no free port between 20000 and 22700")
