"""A real SGLang HTTP server on the CPU, in its own process group, launched with our loaders."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_loader.bucket_loader import LOADERS

START_TIMEOUT_S = 240
TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Server:
    """Where the server listens and what it logs."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]


def cpu_environment(tp: int) -> dict[str, str]:
    """Environment of a CPU engine with `tp` ranks."""
    return {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_NCCL_SO_PATH": "/nonexistent",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(tp)),
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(TESTS),
    }


@contextlib.contextmanager
def sglang_server(
    model: Path,
    folder: Path,
    *,
    tp: int = 1,
    loaders: tuple[str, ...] = (),
    extra: tuple[str, ...] = (),
) -> Iterator[Server]:
    """Serve `model` until the block ends; the log goes to `folder/server.log`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--port", str(port), "--tp-size", str(tp), "--dtype", "float32", "--device", "cpu"),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--disable-overlap-schedule", "--max-total-tokens", "1024", "--skip-server-warmup"),
        *("--mem-fraction-static", "0.1", "--disable-cuda-graph", "--max-running-requests", "4"),
        *("--custom-weight-loader", *LOADERS, *loaders),
    ]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=cpu_environment(tp),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", log, process)
    try:
        _wait(server)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        if _is_healthy(server.url):
            return
        time.sleep(0.5)
    tail = server.log.read_text(errors="replace")[-4000:]
    raise RuntimeError(f"SGLang did not come up within {START_TIMEOUT_S} s:\n{tail}")


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False
