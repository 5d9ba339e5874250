"""What the arms of `disaggregated` have in common: the run, and one arm measured and proven.

An arm's process writes one JSON line per arm, `{"arm": ..., "median_s": ...}` or
`{"arm": ..., "error": ...}`, so that a process that hangs leaves what it has finished.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.arrival import difference
from benchmarks.gpu_memory import MemoryPeaks, used_bytes
from verl_sglang_sync.commands.bench.results_file import medians

Seconds = Mapping[str, float]
Checksums = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One model's run.

    The trainer's ranks are on the first GPUs, the engines on the next ones, replica by replica.

    Attributes:
        model: its shape.
        device: "cuda" or "cpu".
        trainers: ranks of the trainer.
        engine_tp: tensor-parallel ranks of each replica.
        replicas: number of engines.
        runs: measured syncs of each arm.
        bucket_mb: size of a bucket, in MiB.
        arm_timeout_s: limit of one arm.
        start_timeout_s: of imports, weights and the servers' start, on top of the first arm's.
        folder: logs, rows and the config.
    """

    model: str
    device: str
    trainers: int
    engine_tp: int
    replicas: int
    runs: int
    bucket_mb: int
    arm_timeout_s: float
    start_timeout_s: float
    folder: str

    def as_json(self) -> str:
        """For the command line of an arm's process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `as_json` has written."""
        return cls(**json.loads(text))

    @property
    def gpus(self) -> range:
        """All GPUs of the run, as the driver numbers them; none on a CPU."""
        num_gpus = self.trainers + self.replicas * self.engine_tp
        return range(num_gpus if self.device == "cuda" else 0)

    def engine_gpus(self, replica: int) -> range:
        """Of a replica's ranks."""
        first = self.trainers + replica * self.engine_tp
        return range(first, first + self.engine_tp)

    @property
    def arrival_folders(self) -> list[Path]:
        """Of each replica: where its ranks write their checksums."""
        return [Path(self.folder, f"arrival-{replica}") for replica in range(self.replicas)]

    def row(self, arm: str) -> dict[str, Any]:
        """What all rows say of where an arm ran."""
        return {
            "arm": arm,
            "model": self.model,
            "gpus": len(self.gpus),
            "tp": self.engine_tp,
            "trainers": self.trainers,
            "replicas": self.replicas,
        }


def run_arms(arms: Iterable[str], rows: Path, measure: Callable[[str], dict[str, Any]]) -> None:
    """Measure arm after arm; the first that fails ends it: its group or server may be broken."""
    for arm in arms:
        write_row(rows, {"started": arm})
        try:
            row = measure(arm)
        except Exception:
            write_row(rows, {"arm": arm, "error": traceback.format_exc()})
            return
        write_row(rows, row)


def write_row(rows: Path, line: dict[str, Any]) -> None:
    """Append a line, and have it on disk."""
    with rows.open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def measure_arm(
    arm: str,
    setting: Setting,
    *,
    warm_ups: int,
    sync: Callable[[], Seconds],
    advance: Callable[[], object],
    trainer_checksums: Callable[[], Checksums],
    held_by_engines: Callable[[], list[Checksums]],
) -> dict[str, Any]:
    """Warm up, measure syncs, watch the memory of one more, and check what arrived.

    Args:
        arm: its name.
        warm_ups: syncs that are not measured, at least 1.
        sync: one sync; returns seconds by stage.
        advance: changes every weight of the trainer.
        trainer_checksums: of the trainer's weights.
        held_by_engines: checksums of each replica's weights.

    Raises:
        RuntimeError: an engine does not hold what was sent, or held it before.
    """
    before = used_bytes(setting.gpus)
    advance()
    expected = trainer_checksums()
    for held in held_by_engines():
        if known := len(expected) - len(difference(expected, held)):
            raise RuntimeError(f"{arm}: an engine holds {known} groups already")
    first = time.perf_counter()
    sync()
    first_s = time.perf_counter() - first
    _check(arm, "first", expected, held_by_engines())
    for _ in range(warm_ups - 1):
        advance()
        sync()
    measured = []
    for _ in range(setting.runs):
        advance()
        measured.append(dict(sync()))
    advance()
    with MemoryPeaks(setting.gpus) as watch:
        sync()
    _check(arm, "last", trainer_checksums(), held_by_engines())
    extra = [peak - start for peak, start in zip(watch.peaks, before, strict=True)]
    return {
        **setting.row(arm),
        "runs": setting.runs,
        "median_s": medians(measured),
        "runs_s": measured,
        "first_s": first_s,
        "host_bytes": 0,
        "peak_extra_gpu_bytes": max(0, *extra[: setting.trainers]),
        "peak_extra_engine_gpu_bytes": max(0, 0, *extra[setting.trainers :]),
        "arrived": f"all {len(expected)} groups, in each replica, first and last sync; none before",
    }


def _check(arm: str, which: str, trainer: Checksums, engines: list[Checksums]) -> None:
    for replica, engine in enumerate(engines):
        if missing := difference(trainer, engine):
            raise RuntimeError(
                f"{arm}: after the {which} sync {len(missing)} of {len(trainer)} groups of "
                f"replica {replica}'s weights are not the trainer's, such as {missing[0]}"
            )
