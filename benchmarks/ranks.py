"""A trainer of several ranks and engines on the same GPUs: for `colocated` and `megatron_sync`.

N trainer ranks, N / T engines of T ranks each. All arms run in one run, one after the other; the
sync's seconds include the export. Arms besides `native`, which is verl's own, and the presets:
`per_tensor` makes a bucket, and a request, of every tensor; where `compiled` reads in place,
`compiled_exchanged` exchanges shards and `compiled_gathered` gathers all weights on every rank;
`compiled_apart` takes the GPUs for several hosts', so that IPC between these is refused;
`export_only` runs the export to its end and sends nothing; `all_gather_limit` gathers the same
bytes in flat pieces, and `all_to_all_limit` gives each rank only its part of them.
`host_copy_limit` copies each rank's part from pinned host memory.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.gpu_memory import MemorySamples
from support.engine_loaders import HOST_LOADER
from support.ipc import ask_engine
from support.trainer import Ranks, TrainerRank
from verl_sglang_sync.commands.bench.arms import (
    BUCKET_BYTES,
    HOST_COPY_LIMIT,
    NativeManager,
    notes_of,
)
from verl_sglang_sync.commands.bench.colocated import HostCopy, timed
from verl_sglang_sync.commands.bench.engine_server import DUMMY, engine_server, wait_until_healthy
from verl_sglang_sync.commands.bench.model_shapes import MODELS
from verl_sglang_sync.commands.bench.results_file import medians

APART = "compiled_apart"
OURS: dict[str, dict[str, Any]] = {
    "per_tensor": {"mode": "flattened", "bucket_bytes": 1},
    **{preset: {"mode": preset} for preset in ("flattened", "compiled")},
    "compiled_exchanged": {"mode": "compiled", "routes": ["exchange"]},
    "compiled_gathered": {"mode": "compiled", "routes": []},
    APART: {"mode": "compiled"},
}
NATIVE, EXPORT_ONLY = "native", "export_only"
LIMITS = ("all_gather_limit", "all_to_all_limit", HOST_COPY_LIMIT)
NUM_WARM_UPS = 5  # ours: a plan, an arrangement, an exchange are each learned and proven in a sync
ENVIRONMENTS = {
    "cuda": {"NCCL_CUMEM_ENABLE": "0"},  # SGLang's own; a mixture fails in CUDA
    "cpu": {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"},
}
TIMEOUT_S = 1500

Step = Callable[[], dict[str, Any]]
Export = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""A rank's weights, as verl's engine hands them to a rollout."""


def measure(
    make_export: Callable[[TrainerRank], Export],
    arms: list[str],
    *,
    model: str,
    config: Path,
    ranks: int,
    tp: int,
    runs: int,
    device: str,
    folder: Path,
    bucket_bytes: int = BUCKET_BYTES,
    environment: Mapping[str, str] | None = None,
    engine_arguments: tuple[str, ...] = (),
    gpus_per_host: int = 1,
    asleep_s: float | None = None,
) -> list[dict[str, Any]]:
    """A row for each arm, up to one that fails or is interrupted.

    Args:
        make_export: makes a rank's model, in its process.
        config: folder of the engines' model.
        ranks: of the trainer, in all.
        tp: ranks of each engine.
        environment: of the ranks' processes, beside this one's.
        engine_arguments: more of SGLang's.
        gpus_per_host: in `compiled_apart`.
        asleep_s: seconds that the engines sleep before each sync, as in a training. None: they do
            not.
    """
    lines = folder / f"arms-{model}-{ranks}-{tp}.jsonl"
    lines.write_text("")
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    where = {"tp": tp, "device": device, "backend": backend, "environment": environment}
    with (
        _engines(
            config, model, ranks, tp, device, folder, engine_arguments, saves_all=arms == [NATIVE]
        ) as logs,
        Ranks(folder, list(logs), **where) as trainers,
    ):
        how = gpus_per_host, asleep_s
        args = make_export, arms, str(config), runs, bucket_bytes, lines, *how
        trainers.run(_import_what_it_needs, *args)  # while the engines start
        for url, log in logs.items():
            wait_until_healthy(url, log)
        # The arms before an error, or an interrupt, have been measured.
        try:
            for outcome in trainers.attempt(_measure_rank, *args, limit_s=TIMEOUT_S):
                if outcome.error is not None:
                    print(outcome.error, file=sys.stderr)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
    row = {"model": model, "gpus": ranks if device == "cuda" else 0, "tp": tp, "host_bytes": 0}
    return [row | json.loads(line) for line in lines.read_text().splitlines()]


@contextmanager
def _engines(
    config: Path,
    model: str,
    ranks: int,
    tp: int,
    device: str,
    folder: Path,
    arguments: tuple[str, ...],
    *,
    saves_all: bool,
) -> Iterator[dict[str, Path]]:
    """Starts engines of `tp` ranks each, one behind the other on the trainer ranks' GPUs: the log
    of each by its URL. With `saves_all` they sleep as verl launches them.
    """
    os.environ.update(ENVIRONMENTS[device])
    logs = {first: folder / f"server-{model}-tp{tp}-{first}.log" for first in range(0, ranks, tp)}
    with ExitStack() as stack:
        yield {
            stack.enter_context(
                engine_server(
                    config,
                    device=device,
                    host_backup="on" if saves_all else "auto",
                    is_moe="num_experts" in MODELS[model],
                    log=log,
                    tp=tp,
                    first_gpu=first,
                    extra=(*DUMMY, *arguments),
                    loaders=(HOST_LOADER,),
                    wait=False,
                )
            ): log
            for first, log in logs.items()
        }


def _import_what_it_needs(rank: TrainerRank, *args: Any) -> None:
    """Does nothing: to unpickle the arguments has imported their modules."""


def _measure_rank(
    rank: TrainerRank,
    make_export: Callable[[TrainerRank], Export],
    arms: list[str],
    config: str,
    runs: int,
    bucket_bytes: int,
    lines: Path,
    gpus_per_host: int,
    asleep_s: float | None,
) -> None:
    """Measure every arm; rank 0 appends what it saw to `lines`, one arm after the other."""
    export = make_export(rank)
    for arm in arms:
        print(arm, flush=True)
        settings = {"bucket_bytes": bucket_bytes, **OURS.get(arm, {})}
        with _apart(rank, gpus_per_host) if arm == APART else nullcontext():
            manager = _manager(arm, rank, config, settings)
            step = _step(arm, rank, export, manager)
            warm_ups = NUM_WARM_UPS if arm in OURS else 1
            own_asleep_s = None if manager is None else asleep_s  # what syncs nothing needs none
            seen = _measure_arm(step, manager, rank.device, own_asleep_s, warm_ups, runs)
        if rank.rank == 0:
            with lines.open("a") as file:
                file.write(
                    json.dumps({"arm": arm, **seen, "bucket_bytes": settings["bucket_bytes"]})
                    + "\n"
                )


@contextmanager
def _apart(rank: TrainerRank, gpus_per_host: int) -> Iterator[None]:
    """Has this rank, and the engine ranks that it leads, live on hosts with so many GPUs each."""
    host = f"host {rank.rank // gpus_per_host}"
    with mock.patch("verl_sglang_sync.routes.table.table_route.host_id", lambda: host):
        try:
            if rank.is_leader:
                ask_engine(rank.client, rank.tp, HOST_LOADER, f"apart {gpus_per_host}")
            yield
        finally:
            if rank.is_leader:
                ask_engine(rank.client, rank.tp, HOST_LOADER, "here")


def _measure_arm(
    step: Step,
    manager: Any,
    device: torch.device,
    asleep_s: float | None,
    warm_ups: int,
    runs: int,
) -> dict[str, Any]:
    """What `runs` steps take, and one more with a look at the GPU's memory if its engine sleeps."""
    measured: list[dict[str, float]] = []
    notes: dict[str, Any] = {}
    for i in range(warm_ups + runs):
        if i == warm_ups and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds, notes = _measure_step(step, manager, device, asleep_s)
        print(f"step {i}: {seconds}", flush=True)
        measured.append(seconds)
    if device.type == "cuda":
        notes["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
        if asleep_s is not None:
            with MemorySamples(lambda: 0) as memory:
                _measure_step(step, manager, device, asleep_s)
            notes["memory"] = memory.of(0)
    if "pair_bytes" in notes:
        notes["pair_bytes"] = _pairs_of_all(notes["pair_bytes"])
    timed = measured[warm_ups:]
    return {
        "runs": runs,
        "median_s": medians(timed),
        "warm_up_s": [seconds["sync"] for seconds in measured[:warm_ups]],
        "first_sync_s": measured[0],
        "runs_s": timed,
        **notes,
    }


def _pairs_of_all(pairs: list[list[int]]) -> list[list[int]]:
    """The bytes that each trainer rank sends to each engine rank, in order of both.

    Args:
        pairs: a row for each trainer rank, with the engine ranks that this trainer rank leads to.
    """
    of_ranks: list[list[list[int]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, pairs)
    return [list(itertools.chain(*rows)) for rows in zip(*of_ranks, strict=True)]


def _measure_step(
    step: Step, manager: Any, device: torch.device, asleep_s: float | None
) -> tuple[dict[str, float], dict[str, Any]]:
    """One step of all ranks, in a cycle of sleep and wake-up if engines sleep.

    Args:
        manager: of the engine, or None if the step syncs nothing.
    """
    seconds: dict[str, float] = {}

    def stage(name: str, call: Callable[[], Any]) -> Any:
        dist.barrier()
        with timed(seconds, name, device):
            return call()

    def resume(tag: str) -> None:
        asyncio.run(manager.resume((tag,)))

    if asleep_s is not None:
        stage("release", lambda: asyncio.run(manager.release()))
        time.sleep(asleep_s)
        stage("resume_weights", partial(resume, "weights"))
    notes = stage("sync", step)
    if asleep_s is not None:
        stage("resume_kv", partial(resume, "kv_cache"))
        seconds["cycle"] = sum(seconds.values())
    elif manager is not None and manager.report is not None:
        resume("kv_cache")  # resident already, and no part of the sync: our report ends here
    return seconds | notes.pop("seconds", {}), notes


def _manager(arm: str, rank: TrainerRank, config: str, settings: dict[str, Any]) -> Any:
    """The arm's sharding manager, or verl's own sync, or None for what syncs nothing."""
    if arm in OURS:
        return rank.manager(timeout_s=600, **settings)
    if arm == NATIVE:
        return NativeManager(rank.url if rank.is_leader else None, Path(config), rank.mesh)
    return None


def _step(arm: str, rank: TrainerRank, export: Export, manager: Any) -> Step:
    if manager is not None:
        return _syncing(manager, export)
    if arm == EXPORT_ONLY:
        return lambda: _drain(export)
    part = _drain(export)["bytes"] // dist.get_world_size()
    if arm == HOST_COPY_LIMIT:
        return _host_copy(part, rank.device)
    return _collective(arm, rank, part)


def _syncing(manager: Any, export: Export) -> Step:
    def run() -> dict[str, Any]:
        asyncio.run(manager.sync(export(), version="0"))
        if manager.report is None:
            return {}
        report = manager.report
        size = {"num_tensors": report.num_tensors, "bytes": report.payload_bytes}
        return {**size, "pair_bytes": report.pair_bytes, **notes_of(report)}

    return run


def _drain(export: Export) -> dict[str, Any]:
    sizes = [tensor.nbytes for _, tensor in export()]
    return {"num_tensors": len(sizes), "bytes": sum(sizes)}


def _host_copy(nbytes: int, device: torch.device) -> Step:
    """A rank's part of all bytes from pinned host memory, on all ranks at the same time."""
    copy = HostCopy(nbytes, device)

    def run() -> dict[str, Any]:
        copy.launch()
        return {"bytes": nbytes}

    return run


def _collective(arm: str, rank: TrainerRank, nbytes: int) -> Step:
    """The bare collective that any sync needs: every byte to every rank, or each rank its part."""
    world = dist.get_world_size()
    chunk = min(nbytes, BUCKET_BYTES // world) // world * world
    rounds = -(-nbytes // chunk)
    local = torch.empty(chunk, dtype=torch.uint8, device=rank.device)
    all_of_it = torch.empty(chunk * world, dtype=torch.uint8, device=rank.device)

    def run() -> dict[str, Any]:
        for _ in range(rounds):
            if arm == "all_gather_limit":
                dist.all_gather_into_tensor(all_of_it, local)
            else:
                dist.all_to_all_single(all_of_it[:chunk], local)
        return {"bytes": rounds * chunk * world}

    return run
