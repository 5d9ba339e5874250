"""Two GRPO steps of a tiny model on the CPU, then what each sync cost and that it arrived.

Runs `grpo_cpu_tiny.sh`, where `rollout.load_format=dummy` starts the engine from random weights:
its probabilities equal the trainer's only if every sync really arrived.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from tiny_assets import make_assets

from verl_sglang_sync.config import MODES

RECIPE = Path(__file__).with_name("grpo_cpu_tiny.sh")
MAX_PROBS_DIFF = 1e-5  # float32 on both sides, another order of sums
MIN_PEARSON = 0.9999
MILESTONES = (
    ("Started a local Ray instance", "Ray is up; workers load verl and torch"),
    ("SGLang http server", "SGLang starts in its own processes"),
    ("Training Progress", "training"),
    ("step:1 ", "step 1 done"),
    ("step:2 ", "step 2 done"),
)


@dataclass(frozen=True)
class Step:
    """One training step: verl's metrics and the report of the sync that prepared its rollout."""

    metrics: dict[str, Any]
    sync: dict[str, Any]

    @property
    def arrived(self) -> bool:
        """True if trainer and engine agree on every sampled token's probability."""
        return bool(
            self.metrics["training/rollout_probs_diff_max"] < MAX_PROBS_DIFF
            and self.metrics["training/rollout_actor_probs_pearson_corr"] > MIN_PEARSON
        )


def run_recipe(
    folder: Path,
    preset: str,
    *overrides: str,
    console: Console,
    environment: Mapping[str, str] | None = None,
    limit_s: float = threading.TIMEOUT_MAX,
) -> int:
    """Run the recipe with `overrides`, its output in `folder/run.log`; return its exit status.

    `environment` is added to this process's. The run is killed after `limit_s`.
    """
    for stale in ("metrics.jsonl", "syncs.jsonl"):
        (folder / stale).unlink(missing_ok=True)
    report = f"actor_rollout_ref.rollout.custom.weight_sync.report_file={folder}/syncs.jsonl"
    reports = [report] if preset else []  # verl's own sync writes none
    variables = {
        **os.environ,
        **(environment or {}),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "ASSETS": str(folder),
        "WEIGHT_SYNC": preset,
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "PYTHONUNBUFFERED": "1",
    }
    command = ["bash", str(RECIPE), *overrides, *reports]
    with (
        (folder / "run.log").open("w") as log,
        subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
        _progress(console) as progress,
    ):
        task = progress.add_task("starting Ray (most of the time goes into imports)")
        assert process.stdout is not None
        limit = threading.Timer(limit_s, process.kill)
        limit.daemon = True
        limit.start()
        for line in process.stdout:
            log.write(line)
            for mark, description in MILESTONES:
                if mark in line:
                    progress.update(task, description=description)
        limit.cancel()
    return process.wait()


def read_steps(folder: Path) -> list[Step]:
    """Pair each training step with the sync before its rollout (version = step - 1)."""
    syncs = {}
    for line in (folder / "syncs.jsonl").read_text().splitlines():
        sync = json.loads(line)
        syncs[sync["weight_version"]] = sync
    return [Step(row["data"], syncs[str(row["step"] - 1)]) for row in read_metrics(folder)]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """What verl logged of each training step: its number as "step", its metrics as "data"."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def table_of(steps: list[Step]) -> Table:
    """A column per step: the stages' seconds, buckets, bytes, and the proof of arrival."""
    table = Table(title="the weight sync before each step")
    table.add_column("")
    for number, step in enumerate(steps, 1):
        table.add_column(
            f"step {number}", justify="right", style="green" if step.arrived else "red"
        )
    for stage in stages_of(steps):
        spent = (step.sync["seconds"].get(stage) for step in steps)
        cells = ("" if seconds is None else f"{seconds:.3f} s" for seconds in spent)
        table.add_row(stage.replace("_", " "), *cells)
    table.add_section()
    table.add_row("buckets", *(str(s.sync["num_buckets"]) for s in steps))
    table.add_row("tensors", *(str(s.sync["num_tensors"]) for s in steps))
    table.add_row("bytes", *(f"{s.sync['payload_bytes']:,}" for s in steps))
    table.add_section()
    for label, key, form in (
        ("max |p(trainer) - p(engine)|", "rollout_probs_diff_max", ".1e"),
        ("Pearson correlation", "rollout_actor_probs_pearson_corr", ".6f"),
    ):
        table.add_row(label, *(format(s.metrics[f"training/{key}"], form) for s in steps))
    return table


def stages_of(steps: list[Step]) -> list[str]:
    """Every stage that a step's sync went through, in the order in which the syncs began them."""
    stages: list[str] = []
    for step in steps:
        position = 0
        for stage in step.sync["seconds"]:
            if stage in stages:
                position = stages.index(stage) + 1
            else:
                stages.insert(position, stage)
                position += 1
    return stages


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
    )


def _tail(path: Path, num_lines: int = 30) -> str:
    with path.open() as file:
        return "".join(collections.deque(file, num_lines))


def main() -> int:
    """Run, show the table, and exit with 0 only if the weights arrived at every step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--preset", default="compiled", choices=MODES)
    parser.add_argument("overrides", nargs="*", help="more Hydra overrides")
    args = parser.parse_args()
    console, started = Console(), time.perf_counter()
    folder = args.folder.resolve()
    make_assets(folder)
    status = run_recipe(folder, args.preset, *args.overrides, console=console)
    if status != 0:
        console.print(_tail(folder / "run.log"), markup=False)
        console.print(f"[red]the run failed with status {status}; see {folder}/run.log")
        return 1
    steps = read_steps(folder)
    console.print(table_of(steps))
    if not steps or not all(step.arrived for step in steps):
        console.print("[red]the engine did not sample from the trainer's weights")
        return 1
    console.print(
        f"[green]every sync arrived[/] (the engine started from random weights); "
        f"{time.perf_counter() - started:.0f} s, log in {args.folder}/run.log"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
