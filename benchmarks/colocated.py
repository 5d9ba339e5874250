"""Seconds of a colocated weight sync and of its memory stages, every arm against a real SGLang.

    python benchmarks/colocated.py --models qwen3-8b qwen3-30b-a3b --runs 5 --json FILE
    python benchmarks/colocated.py --models qwen3-30b-a3b --gpus 4 --tp 4      # see fsdp_sync
    python benchmarks/colocated.py --models tiny --device cpu

One process stands for the trainer: by default with an FSDP2 model of one rank on the engine's
device, exported as verl does; the export is part of each sync. Each run goes through release,
resume weights, sync, resume kv, as a training step does. Every arm has a server and a trainer
process of its own.

Arms: `native` is verl 0.9.1's own code with its own settings (host backup, named tensors, one
request per bucket), `copy_limit` a copy of the same bytes within the device; the others are ours,
with the host backup that their preset gets. `compiled` is the preset as it is: the engine reads the
trainer's parameters in place. `compiled_tensors` and `compiled_flat` do so with a list of tensors
that does not say what it reads, and is gone through at every sync; the tensors are in storages of
their own, or in one. `compiled_packed` packs, as a trainer must that gathers its shards.
`native_float32` and `compiled_float32` export float32, verl's default, into engines of bfloat16.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(path) for path in (ROOT, ROOT / "tests", ROOT / "plugins")]
sys.path[:0] = PATHS

import psutil  # noqa: E402
import torch  # noqa: E402

from benchmarks.colocated_arms import (  # noqa: E402
    BUCKET_BYTES,
    SYNC_STAGES,
    counts_of,
    native_engine,
    native_sync,
    seconds_of,
    synchronize,
)
from benchmarks.engine_server import engine_server, wait_until_healthy  # noqa: E402
from benchmarks.fsdp_rank import GATHERED, LIMITS, PRESETS  # noqa: E402
from benchmarks.fsdp_sync import measure_on_gpus  # noqa: E402
from benchmarks.model_shapes import MODELS, write_config  # noqa: E402
from benchmarks.results_file import hardware, medians, print_table, write_results  # noqa: E402
from benchmarks.trainers import Kind, NamedTensor, make_trainer, make_weights, size_of  # noqa: E402

NUM_WARM_UPS = 4  # compiled: one records, one replays in place, one keeps what it maps, one more
STAGES = ("release", "resume_weights", "sync", "resume_kv", "cycle")


@dataclass(frozen=True)
class Arm:
    """One way to sync.

    Attributes:
        mode: preset, None for verl's own code.
        host_backup: the engine saves all weights on release, as verl launches it; else
            `host_backup=auto`: only what the load plan does not rewrite.
        trainer: what is exported.
        settings: keys of the preset.
    """

    mode: str | None
    host_backup: bool = False
    trainer: Kind = "fsdp2"
    settings: dict[str, Any] = field(default_factory=dict)


PACKED = {"read_in_place": False}
ARMS = {
    "native": Arm(None, host_backup=True),
    "bucketed": Arm("bucketed", host_backup=True),
    "flattened": Arm("flattened", host_backup=True),
    "compiled": Arm("compiled"),
    "compiled_tensors": Arm("compiled", trainer="tensors"),
    "compiled_flat": Arm("compiled", trainer="flat"),
    "compiled_packed": Arm("compiled", settings={**PACKED, "keep_staging_buffers": True}),
    "compiled_packed_freed": Arm("compiled", settings=PACKED),
    "native_float32": Arm(None, host_backup=True, trainer="fsdp2_float32"),
    "compiled_float32": Arm("compiled", trainer="fsdp2_float32"),
}
COPY_LIMIT = "copy_limit"


@dataclass(frozen=True)
class Runs:
    """How an arm is measured.

    Attributes:
        num: cycles, each with all its stages.
        asleep_s: seconds between release and resume, in which a trainer makes its step. The driver
            cleans released memory in the background, 61 GB in 0.3 s; a resume that comes before
            waits for it.
    """

    num: int
    asleep_s: float


class NativeSync:
    """verl's own client and sync."""

    def __init__(self, url: str, config: Path) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self._engine = native_engine(url, config)
        self._mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("infer_tp",))

    async def release(self) -> None:
        await self._engine.release_memory_occupation(tags=["kv_cache", "weights"])

    async def resume(self, tag: str) -> None:
        await self._engine.resume_memory_occupation(tags=[tag])

    async def sync(self, weights: Iterable[NamedTensor]) -> dict[str, Any]:
        await native_sync(self._engine, self._mesh, weights)
        return {}


class OurSync:
    """The sharding manager, stage by stage as verl drives it."""

    def __init__(self, url: str, arm: Arm, device: torch.device) -> None:
        from verl_sglang_sync.collective import SingleProcess
        from verl_sglang_sync.config import WeightSyncConfig
        from verl_sglang_sync.engine.server_client import SGLangServerClient
        from verl_sglang_sync.sync.sharding_manager import SGLangShardingManager

        self._manager = SGLangShardingManager(
            engine=SGLangServerClient(url, timeout_s=600),
            settings=WeightSyncConfig(
                mode=arm.mode,  # type: ignore[arg-type]
                bucket_bytes=BUCKET_BYTES,
                multi_stage_wake_up=True,
                free_cache_engine=True,
                **arm.settings,
            ),
            group=SingleProcess(),
            device=device,
            replica=0,
        )

    async def release(self) -> None:
        await self._manager.release()

    async def resume(self, tag: str) -> None:
        await self._manager.resume((tag,))

    async def sync(self, weights: Iterable[NamedTensor]) -> dict[str, Any]:
        await self._manager.sync(weights, version="0")
        report = self._manager.report
        seconds = {f"sync_{stage}": spent for stage, spent in seconds_of(report).items()}
        for stage, costs in report.stages.items():  # the engine's own part of sleep and wake-up
            for tag, cost in costs.items():
                seconds[f"engine_{stage}_{tag}"] = max(cost["seconds"])
        return {"seconds": seconds, "counts": counts_of(report)}


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
    """Warm up, measure the cycles, and make the row."""
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
        return times | notes.get("seconds", {})

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
    """The part of a row that all arms have."""
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
    weights = make_weights(model, device, flat=False)
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
    """Rows of one model.

    Every arm has a trainer process and a server of its own: an engine keeps the trainer's memory
    mapped between syncs, so the arms of one process would pay for each other's weights.
    """
    for name in arms:
        started = time.perf_counter()
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            yield pool.submit(measure_arm, model, name, device, runs, folder).result()
        print(f"{model} {name}: {time.perf_counter() - started:.0f} s", flush=True)


def measure_arm(
    model: str, name: str, device: torch.device, runs: Runs, folder: Path
) -> dict[str, Any]:
    """The row of one arm, in a process of its own."""
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
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def main() -> None:
    """Run all arms of all models; see the module docstring."""
    names, on_gpus = [*ARMS, COPY_LIMIT], ["native", *PRESETS, GATHERED, *LIMITS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["qwen3-8b"])
    parser.add_argument("--arms", nargs="+", help=f"default: all of {names}, or {on_gpus}")
    parser.add_argument("--gpus", type=int, default=1, help="trainer ranks; more than 1: FSDP2")
    parser.add_argument("--tp", type=int, default=1, help="of each engine")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--asleep-s", type=float, default=0.5, help="one GPU: see `Runs`")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, help="server logs; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    allowed = names if args.gpus == 1 else on_gpus
    if wrong := set(args.arms or ()) - set(allowed):
        parser.error(f"arms {sorted(wrong)} with --gpus {args.gpus}; allowed: {allowed}")
    if args.gpus % args.tp or args.gpus < args.tp:
        parser.error(f"--tp {args.tp}: must divide --gpus {args.gpus}")
    arms = args.arms or allowed
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    folder = args.folder or Path(tempfile.mkdtemp(prefix="colocated-"))
    folder.mkdir(parents=True, exist_ok=True)
    path = args.json or Path(f"benchmarks/results/colocated-{hardware()}.json")
    rows: list[dict[str, Any]] = []
    if args.gpus > 1:
        os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
        for model in args.models:
            rows += measure_on_gpus(model, arms, args.gpus, args.tp, args.runs, args.device, folder)
            write_results(path, "colocated", rows)
        print_table(rows, ("sync", *(f"sync_{stage}" for stage in SYNC_STAGES)))
        missing = {(model, arm) for model in args.models for arm in arms} - {
            (row["model"], row["arm"]) for row in rows
        }
        if missing:
            parser.exit(1, f"not measured: {sorted(missing)}\n")
        return
    for model in args.models:
        for row in measure(model, arms, device, Runs(args.runs, args.asleep_s), folder):
            rows.append(row)
            write_results(path, "colocated", rows)  # a run that is cut short leaves what it has
    print_table(rows, STAGES)


if __name__ == "__main__":
    main()
