"""Seconds of a colocated weight sync and of its memory stages on one GPU, against a real SGLang.

One process stands for the trainer: by default with an FSDP2 model of one rank on the engine's
device, exported as verl does; the export is part of each sync. Each run goes through release,
resume weights, sync, resume kv, as a training step does. Every arm has a server and a trainer
process of its own: an engine keeps the trainer's memory mapped between syncs, so the arms of one
process would pay for each other's weights. `run` is `verl-sglang-sync bench`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch._C._distributed_c10d import HashStore

from verl_sglang_sync.bench.arms import ARMS, COPY_LIMIT, NativeSync, OurSync, synchronize
from verl_sglang_sync.bench.engine_server import engine_server, wait_until_healthy
from verl_sglang_sync.bench.model_shapes import FOR_A_CPU, MODELS, largest_that_fits, write_config
from verl_sglang_sync.bench.results_file import medians, print_table, write_results
from verl_sglang_sync.bench.trainers import Kind, make_trainer, make_weights, size_of

NUM_WARM_UPS = 4  # compiled: one records, one replays in place, one keeps what it maps, one more
STAGES = ("release", "resume_weights", "sync", "resume_kv", "cycle")


@dataclass(frozen=True)
class Runs:
    """How an arm is measured: in `num` cycles, each with all its stages.

    Attributes:
        asleep_s: seconds between release and resume, in which a trainer makes its step. The driver
            cleans released memory in the background, 61 GB in 0.3 s; a resume that comes before
            waits for it.
    """

    num: int
    asleep_s: float


@contextmanager
def timed(times: dict[str, float], stage: str, device: torch.device) -> Iterator[None]:
    """Host seconds of the body with the device idle at both ends."""
    synchronize(device)
    started = time.perf_counter()
    yield
    synchronize(device)
    times[stage] = time.perf_counter() - started


def run_arm(
    name: str, url: str, config: Path, model: str, device: torch.device, runs: Runs
) -> dict[str, Any]:
    arm = ARMS[name]
    weights = make_trainer(arm.trainer, model, device)
    sync = NativeSync(url, config) if arm.mode is None else OurSync(url, arm, device)
    measured: list[dict[str, float]] = []
    notes: dict[str, Any] = {}
    host_bytes = 0

    async def cycle(*, stages: bool) -> dict[str, float]:
        nonlocal notes, host_bytes
        times: dict[str, float] = {}
        if stages:
            before = psutil.virtual_memory().available
            with timed(times, "release", device):
                await sync.release()
            host_bytes = max(host_bytes, before - psutil.virtual_memory().available)
            await asyncio.sleep(runs.asleep_s)
            with timed(times, "resume_weights", device):
                await sync.resume("weights")
        with timed(times, "sync", device):
            notes = await sync.sync(weights)
        if stages:
            with timed(times, "resume_kv", device):
                await sync.resume("kv_cache")
            times["cycle"] = sum(times.values())
        stages_of_sync: dict[str, float] = notes.get("seconds", {})
        return times | stages_of_sync

    warm_ups = [
        asyncio.run(cycle(stages=not arm.host_backup))
        for _ in range(1 if arm.mode is None else NUM_WARM_UPS)
    ]
    allocated = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        _, allocated = size_of(model, device, arm.trainer)
    host_bytes = 0
    for _ in range(runs.num):
        measured.append(asyncio.run(cycle(stages=True)))
    peak = torch.cuda.max_memory_allocated(device) - allocated if device.type == "cuda" else 0
    row = row_of(name, model, device, measured, arm.trainer)
    row.update(
        trainer=arm.trainer,
        warm_up_s=[times["sync"] for times in warm_ups],
        host_backup=arm.host_backup,
        asleep_s=runs.asleep_s,
        host_bytes=host_bytes,
        peak_extra_gpu_bytes=max(peak, 0),
        **notes.get("counts", {}),
    )
    return row


def row_of(
    name: str,
    model: str,
    device: torch.device,
    measured: list[dict[str, float]],
    kind: Kind = "fsdp2",
) -> dict[str, Any]:
    num_tensors, num_bytes = size_of(model, device, kind)
    return {
        "arm": name,
        "model": model,
        "num_tensors": num_tensors,
        "bytes": num_bytes,
        "gpus": 1,
        "tp": 1,
        "runs": len(measured),
        "median_s": medians(measured),
        "runs_s": measured,
        "host_bytes": 0,
        "peak_extra_gpu_bytes": 0,
    }


def copy_limit(model: str, device: torch.device, runs: int) -> dict[str, Any]:
    """`_foreach_copy_` of all tensors within the device."""
    weights = make_weights(model, device)
    sources = [tensor for _, tensor in weights]
    targets = [torch.empty_like(tensor) for tensor in sources]
    measured: list[dict[str, float]] = []
    for _ in range(1 + runs):
        times: dict[str, float] = {}
        with timed(times, "sync", device):
            torch._foreach_copy_(targets, sources)
        measured.append(times)
    return row_of(COPY_LIMIT, model, device, measured[1:])


def measure(
    model: str, arms: list[str], device: torch.device, runs: Runs, folder: Path
) -> Iterator[dict[str, Any]]:
    for name in arms:
        log = folder / f"trainer-{model}-{name}.log"
        with ProcessPoolExecutor(1, get_context("spawn"), _print_into, (log,)) as pool:
            yield pool.submit(measure_arm, model, name, device, runs, folder).result()


def _print_into(log: Path) -> None:
    """Send what this process prints to a file: verl, SGLang and torch print a screen full."""
    with log.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())


def measure_arm(
    model: str, name: str, device: torch.device, runs: Runs, folder: Path
) -> dict[str, Any]:
    prepare(device)
    if name == COPY_LIMIT:
        return copy_limit(model, device, runs.num)
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
        import verl.workers.engine  # noqa: F401  (slow, and the server starts meanwhile)

        wait_until_healthy(url, log)
        return run_arm(name, url, config, model, device, runs)


def prepare(device: torch.device) -> None:
    """What verl does in a trainer process before it imports SGLang."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if device.type == "cpu":
        os.environ.update(SGLANG_USE_CPU_ENGINE="1", TORCHDYNAMO_DISABLE="1")
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "0")
        from verl_sglang_sync.verl.cpu_platform import _share_tensors_by_name

        _share_tensors_by_name()
    else:
        torch.cuda.set_device(device)
    store = HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


ASLEEP_S = 0.5


class BadChoice(ValueError):
    """An option that cannot be; the text says what is allowed."""


def run(
    model: str | None,
    arms: Sequence[str],
    runs: int,
    device: str | None,
    json: Path | None,
    console: Console,
) -> None:
    """Measure the arms and print their medians, see `cli.bench`; `BadChoice` before any starts."""
    on = _device(device)
    name = _model(model, on)
    allowed = [*ARMS, COPY_LIMIT]
    if wrong := [arm for arm in arms if arm not in allowed]:
        raise BadChoice(f"--arms {','.join(wrong)}: allowed: {', '.join(allowed)}")
    folder = Path(tempfile.mkdtemp(prefix="weight-sync-bench-"))
    console.print(f"{name} on {on}; logs of servers and trainers in {folder}")
    rows: list[dict[str, Any]] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for arm in arms:
            task = progress.add_task(f"{arm}: a server starts, {runs} cycles", total=1)
            rows += measure(name, [arm], on, Runs(runs, ASLEEP_S), folder)
            progress.update(task, completed=1, description=arm)
            if json is not None:
                write_results(json, "colocated", rows)
    print_table(rows, STAGES)


def _device(asked: str | None) -> torch.device:
    has_gpu = torch.cuda.is_available()
    kind = asked or ("cuda" if has_gpu else "cpu")
    if kind not in ("cuda", "cpu"):
        raise BadChoice(f"--device {kind}: allowed: cuda, cpu")
    if kind == "cuda" and not has_gpu:
        raise BadChoice("--device cuda: torch finds no GPU here; allowed: cpu")
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


def _model(asked: str | None, device: torch.device) -> str:
    if asked is not None and asked not in MODELS:
        raise BadChoice(f"--model {asked}: allowed: {', '.join(MODELS)}")
    if asked is not None:
        return asked
    if device.type == "cpu":
        return FOR_A_CPU
    try:
        return largest_that_fits(torch.cuda.get_device_properties(device).total_memory)
    except ValueError as error:
        raise BadChoice(str(error)) from None
