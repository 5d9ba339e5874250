"""What the arms of `disaggregated` have in common: measure an arm, prove arrival, make the row.

An arm's process writes one JSON line per arm, `{"arm": ..., "median_s": ...}` or
`{"arm": ..., "error": ...}`, so that a process that hangs leaves what it has finished.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.arrival import difference, engine_checksums
from benchmarks.gpu_memory import used_bytes, watching
from verl_sglang_sync.bench.results_file import medians

NUM_WARM_UPS = 4  # ours: a plan, and then a route for it, are each made and proven in a sync
TRAINER_GPU, ENGINE_GPU = 0, 1

Seconds = Mapping[str, float]


def child_arguments(description: str) -> argparse.Namespace:
    """Command line of an arm's process."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--arms", nargs="+", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--server-log", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--bucket-mb", type=int, required=True)
    return parser.parse_args()


def gpus_of(device: str) -> tuple[int, ...]:
    """The trainer's and the engine's GPU, as the driver numbers them."""
    return (TRAINER_GPU, ENGINE_GPU) if device == "cuda" else ()


def run_arms(arms: Iterable[str], rows: Path, measure: Callable[[str], dict[str, Any]]) -> None:
    """Measure arm after arm; the first that fails ends it: its group or server may be broken."""
    for arm in arms:
        _say(rows, {"started": arm})
        try:
            row = measure(arm)
        except Exception:
            _say(rows, {"arm": arm, "error": traceback.format_exc()})
            return
        _say(rows, row)


def _say(rows: Path, line: dict[str, Any]) -> None:
    with rows.open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def measure_arm(
    arm: str,
    *,
    runs: int,
    device: str,
    sync: Callable[[], Seconds],
    advance: Callable[[], None],
    trainer_checksums: Callable[[], dict[str, int]],
    held_by_engine: Callable[[], dict[str, int]],
) -> dict[str, Any]:
    """Warm up, measure `runs` syncs, watch the memory of one more, and check what arrived.

    Args:
        arm: its name.
        runs: number of measured syncs.
        device: "cuda" or "cpu".
        sync: one sync; returns seconds by stage.
        advance: changes every weight of the trainer.
        trainer_checksums: of the trainer's weights.
        held_by_engine: checksums of the engine's weights.

    Raises:
        RuntimeError: the engine does not hold what was sent, or held it before.
    """
    gpus = gpus_of(device)
    before = used_bytes(gpus)
    advance()
    expected = trainer_checksums()
    stale = difference(expected, held_by_engine())
    if len(stale) != len(expected):
        raise RuntimeError(f"{arm}: the engine holds {len(expected) - len(stale)} groups already")
    first = time.perf_counter()
    sync()
    first_s = time.perf_counter() - first
    _check(arm, "first", expected, held_by_engine())
    for _ in range(NUM_WARM_UPS - 1):
        advance()
        sync()
    measured = []
    for _ in range(runs):
        advance()
        measured.append(dict(sync()))
    advance()
    with watching(gpus) as watch:
        sync()
    _check(arm, "last", trainer_checksums(), held_by_engine())
    extra = [peak - start for peak, start in zip(watch.peaks, before, strict=True)]
    return {
        "arm": arm,
        "gpus": len(gpus),
        "tp": 1,
        "runs": runs,
        "median_s": medians(measured),
        "runs_s": measured,
        "first_s": first_s,
        "host_bytes": 0,
        "peak_extra_gpu_bytes": max(extra[0], 0),
        "peak_extra_engine_gpu_bytes": max(extra[1], 0),
        "arrived": f"all {len(expected)} groups, first and last sync; none before",
    }


def _check(arm: str, which: str, trainer: dict[str, int], engine: dict[str, int]) -> None:
    if missing := difference(trainer, engine):
        raise RuntimeError(
            f"{arm}: after the {which} sync {len(missing)} of {len(trainer)} groups of the "
            f"engine's weights are not the trainer's, such as {missing[0]}"
        )


def checksums_of_engine(url: str, folder: Path) -> Callable[[], dict[str, int]]:
    """How an arm asks the engine."""
    from verl_sglang_sync.engine.server_client import SGLangServerClient

    client = SGLangServerClient(url, timeout_s=120)
    return lambda: engine_checksums(client, folder)


def synchronize(device: str) -> None:
    """Wait for this process's GPU."""
    if device == "cuda":
        torch.cuda.synchronize()
