"""Measurement of a colocated weight sync and its memory stages, with a real SGLang server.

One process is the trainer, with an FSDP2 model of one rank on the engine's device. A run is what
happens in a training step: release, resume weights, sync, resume kv. The sync includes the export,
which is verl's.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch
from torch._C._distributed_c10d import HashStore

from sglang_loader.common.copies.strided import synchronize_device
from verl_sglang_sync.commands.bench.arms import (
    ARMS,
    COPY_LIMIT,
    HOST_COPY_LIMIT,
    Arm,
    manager_of,
    notes_of,
)
from verl_sglang_sync.commands.bench.engine_server import engine_server, wait_until_healthy
from verl_sglang_sync.commands.bench.model_shapes import MODELS, tensor_shapes, write_config
from verl_sglang_sync.commands.bench.results_file import medians
from verl_sglang_sync.commands.bench.trainers import ShardedModel, dtype_on, size_of

# With `compiled` the first sync records, the second replays in place, the third keeps its mappings.
NUM_WARM_UPS = 4
HOST_CHUNK_BYTES = 2 << 30
STAGES = ("release", "resume_weights", "sync", "resume_kv", "cycle")


ASLEEP_S = 0.5
"""Seconds from release to resume, in place of a training step. The driver cleans released memory in
the background, 61 GB in 0.3 s. An earlier resume would wait for the driver."""


@contextmanager
def timed(times: dict[str, float], stage: str, device: torch.device) -> Iterator[None]:
    """Add the host seconds of the body to `times`. The device is idle at both ends."""
    synchronize_device(device)
    started = time.perf_counter()
    yield
    synchronize_device(device)
    times[stage] = time.perf_counter() - started


def run_arm(
    arm: Arm,
    url: str,
    config: Path,
    model: str,
    device: torch.device,
    runs: int,
    asleep_s: float,
    is_offloaded: bool,
) -> dict[str, Any]:
    """Measure an arm in this process, and return the columns of its row."""
    dtype = arm.dtype or dtype_on(device)
    trainer = ShardedModel(model, device, dtype, is_offloaded=is_offloaded)
    weights = trainer.reexport()
    manager = manager_of(arm, url, config, device)
    notes: dict[str, Any] = {}
    host_bytes = 0

    async def cycle(*, stages: bool) -> dict[str, float]:
        nonlocal notes, host_bytes
        times: dict[str, float] = {}
        trainer.advance()  # after a saved plan, syncs are proven until the weights change
        if stages:
            before = psutil.virtual_memory().available
            with timed(times, "release", device):
                await manager.release()
            host_bytes = max(host_bytes, before - psutil.virtual_memory().available)
            await asyncio.sleep(asleep_s)
            with timed(times, "resume_weights", device):
                await manager.resume(("weights",))
        with timed(times, "sync", device):
            await manager.sync(weights, version="0")
        notes = notes_of(manager.report)
        stages_of_sync: dict[str, float] = notes.pop("seconds")
        if stages:
            with timed(times, "resume_kv", device):
                await manager.resume(("kv_cache",))
            times["cycle"] = sum(times.values())
        return times | stages_of_sync

    warm_ups = [
        asyncio.run(cycle(stages=not arm.host_backup))
        for _ in range(1 if arm.mode is None else NUM_WARM_UPS)
    ]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    host_bytes = 0
    size = size_of(model, dtype)
    measured = [asyncio.run(cycle(stages=True)) for _ in range(runs)]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        **size,
        "runs_s": measured,
        "dtype": str(dtype),
        "warm_up_s": [times["sync"] for times in warm_ups],
        "first_sync_s": warm_ups[0],
        "host_backup": arm.host_backup,
        "asleep_s": asleep_s,
        "host_bytes": host_bytes,
        "is_offloaded": is_offloaded,
        "peak_extra_gpu_bytes": max(peak - size["bytes"] * (not is_offloaded), 0),
        **notes,
    }


def copy_limit(model: str, device: torch.device, runs: int) -> dict[str, Any]:
    """Measure `_foreach_copy_` of all tensors within the device."""
    shapes, dtype = [shape for _, shape in tensor_shapes(MODELS[model])], dtype_on(device)
    sources = [torch.ones(shape, dtype=dtype, device=device) for shape in shapes]
    targets = [torch.empty_like(tensor) for tensor in sources]
    measured: list[dict[str, float]] = [{} for _ in range(1 + runs)]
    for times in measured:
        with timed(times, "sync", device):
            torch._foreach_copy_(targets, sources)
    return {**size_of(model, dtype), "runs_s": measured[1:]}


def host_copy_limit(model: str, device: torch.device, runs: int) -> dict[str, Any]:
    """Measure copies of as many bytes from pinned host memory to the device."""
    size = size_of(model, dtype_on(device))
    copy = HostCopy(size["bytes"], device)
    measured: list[dict[str, float]] = [{} for _ in range(1 + runs)]
    for times in measured:
        with timed(times, "sync", device):
            copy.launch()
    return {**size, "runs_s": measured[1:]}


class HostCopy:
    """A copy of `nbytes` from pinned host memory to a device, by the copy engine of a GPU."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        chunk = min(nbytes, HOST_CHUNK_BYTES)
        self._source = torch.empty(chunk, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._source.fill_(1)
        self._target = torch.empty(chunk, dtype=torch.uint8, device=device)

    def launch(self) -> None:
        """Copy all bytes, asynchronously."""
        chunk = self._source.numel()
        for start in range(0, self._nbytes, chunk):
            part = min(chunk, self._nbytes - start)
            self._target[:part].copy_(self._source[:part], non_blocking=True)


def measure(
    model: str,
    name: str,
    device: torch.device,
    runs: int,
    folder: Path,
    asleep_s: float = ASLEEP_S,
    is_offloaded: bool = False,
) -> dict[str, Any]:
    """Measure an arm, and return its row. Server and trainer write their logs to `folder`."""
    # Every arm has its own server and trainer process. An engine keeps the trainer's memory mapped
    # between syncs, so the arms of one process would share the GPU.
    log = folder / f"trainer-{model}-{name}.log"
    with ProcessPoolExecutor(1, get_context("spawn"), _print_into, (log,)) as pool:
        args = model, name, device, runs, folder, asleep_s, is_offloaded
        measured = pool.submit(_measure_arm, *args).result()
    setup = {"arm": name, "model": model, "gpus": int(device.type == "cuda"), "tp": 1, "runs": runs}
    return {**setup, "median_s": medians(measured["runs_s"]), **measured}


def _print_into(log: Path) -> None:
    """Redirect this process's output to a file. verl, SGLang and torch print much."""
    with log.open("wb") as file:
        for output in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), output.fileno())


def _measure_arm(
    model: str,
    name: str,
    device: torch.device,
    runs: int,
    folder: Path,
    asleep_s: float,
    is_offloaded: bool,
) -> dict[str, Any]:
    prepare(device)
    if name == COPY_LIMIT:
        return copy_limit(model, device, runs)
    if name == HOST_COPY_LIMIT:
        return host_copy_limit(model, device, runs)
    arm = ARMS[name]
    config, log = write_config(folder / model, model), folder / f"server-{model}-{name}.log"
    with engine_server(
        config,
        device=device.type,
        host_backup="on" if arm.host_backup else "auto",
        is_moe="num_experts" in MODELS[model],
        log=log,
        wait=False,
    ) as url:
        # A slow import, during which the server starts.
        import verl.workers.engine  # noqa: F401

        wait_until_healthy(url, log)
        return run_arm(arm, url, config, model, device, runs, asleep_s, is_offloaded)


def prepare(device: torch.device) -> None:
    """Set up this process as verl does in a trainer before it imports SGLang."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if device.type == "cpu":
        os.environ.update(SGLANG_USE_CPU_ENGINE="1", TORCHDYNAMO_DISABLE="1")
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "0")
    else:
        torch.cuda.set_device(device)
    store = HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
