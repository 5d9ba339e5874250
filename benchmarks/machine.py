"""All measurements or GPU tests of one machine, as many at a time as its GPUs hold.

    python benchmarks/machine.py benchmarks/rows_4gpus.yaml --out DIR
    python benchmarks/machine.py benchmarks/rows_4gpus.yaml --out DIR --only 'grpo-*' --for-s 560
    python benchmarks/machine.py tests/gpu/parts.yaml --out DIR

A file names runs: a command, the GPUs that it takes, and the seconds after which it is ended. Runs
start in the order of the file, each when enough GPUs are free. What a run prints is in
`DIR/NAME.log`, its results are in `DIR/NAME.json`, and `DIR/NAME.status` has its exit status. A run
that has a status is not made again, so that a call that ended early (`--for-s`) can be repeated.
Runs that need more GPUs than there are are left.

In a command `{python}` is this Python, `{json}` the file of results, and `{folder}` a folder of
the run. Each run keeps load plans of its own.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "plugins")]

from omegaconf import OmegaConf  # noqa: E402

from sglang_loader.common.engine_settings import LOAD_PLANS_VARIABLE  # noqa: E402

POLL_S = 0.2
GRACE_S = 10.0
"""Longest wait for an interrupted run."""
TIMED_OUT = 124
"""Exit status of a run that its limit has ended."""


@dataclass(frozen=True)
class Run:
    """A command that measures.

    Attributes:
        limit_s: seconds after which the run is ended.
    """

    name: str
    gpus: int
    limit_s: float
    command: str


@dataclass(frozen=True)
class Running:
    """A run that has started on these GPUs."""

    run: Run
    gpus: tuple[int, ...]
    process: subprocess.Popen[bytes]
    started: float

    def status(self) -> int | None:
        """Return the exit status, or None while the run goes on. End a run after its limit."""
        status = self.process.poll()
        if status is None and time.monotonic() > self.started + self.run.limit_s:
            status = TIMED_OUT
        if status is not None:
            self.end()
        return status

    def end(self) -> None:
        """End the run, with what is left of the processes of its group."""
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if self.process.poll() is None:  # so that it ends what leads other groups
                os.killpg(self.process.pid, signal.SIGINT)
                self.process.wait(GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def read_runs(path: Path, only: str) -> list[Run]:
    """Read the runs of a file whose names match a pattern.

    Raises:
        ValueError: a run has another key than those of `Run`, or lacks one, or its command has
            other braces than those that are replaced, or no name matches.
    """
    document: Any = OmegaConf.to_container(OmegaConf.load(path))
    runs = []
    for name, fields in document.items():
        if fields.keys() != {"gpus", "limit_s", "command"}:
            raise ValueError(f"{path}: {name} has {sorted(fields)}, not command, gpus, limit_s")
        try:
            fields["command"].format(python="", json="", folder="")
        except (KeyError, IndexError, ValueError) as error:
            text = "allowed: {python}, {json}, {folder}"
            raise ValueError(f"{path}: the command of {name} has braces: {error}. {text}") from None
        if fnmatch.fnmatch(str(name), only):
            runs.append(Run(name=str(name), **fields))
    if not runs:
        raise ValueError(f"{path} has no run {only!r}: allowed: {', '.join(map(str, document))}")
    return runs


def statuses_of(runs: list[Run], out: Path) -> dict[str, int]:
    """Return the exit status of each run that was made, now or earlier, by name."""
    files = {run.name: out / f"{run.name}.status" for run in runs}
    return {name: int(file.read_text()) for name, file in files.items() if file.exists()}


def start(run: Run, gpus: tuple[int, ...], out: Path) -> Running:
    """Start a run on these GPUs, without what an interrupted one of this name has left."""
    for left in (f"{run.name}.plans", run.name):
        shutil.rmtree(out / left, ignore_errors=True)
    (out / f"{run.name}.json").unlink(missing_ok=True)
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(number) for number in range(max(gpus) + 1)]
    command = run.command.format(
        python=sys.executable, json=out / f"{run.name}.json", folder=out / run.name
    )
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": ",".join(names[number] for number in gpus),
        LOAD_PLANS_VARIABLE: str(out / f"{run.name}.plans"),
    }
    with (out / f"{run.name}.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_accept_interrupts,
        )
    return Running(run, gpus, process, time.monotonic())


def _accept_interrupts() -> None:
    """Undo that a shell in the background has the processes that it starts ignore interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def make(runs: list[Run], num_gpus: int, out: Path, for_s: float) -> dict[str, int]:
    """Make runs side by side.

    Args:
        for_s: no run begins that could last longer than this many seconds from now on.

    Returns:
        The exit status of each run that was made now, by name.
    """
    made = statuses_of(runs, out)
    waiting = [run for run in runs if run.name not in made and run.gpus <= num_gpus]
    running: list[Running] = []
    statuses: dict[str, int] = {}
    free, deadline = set(range(num_gpus)), time.monotonic() + for_s
    try:
        while waiting or running:
            waiting = [run for run in waiting if time.monotonic() + run.limit_s <= deadline]
            # In order: a run of many GPUs would wait forever behind runs of one.
            while waiting and waiting[0].gpus <= len(free):
                run = waiting.pop(0)
                gpus = tuple(sorted(free)[: run.gpus])
                free -= set(gpus)
                running.append(start(run, gpus, out))
            for each in list(running):
                if (status := each.status()) is not None:
                    running.remove(each)
                    free |= set(each.gpus)
                    statuses[each.run.name] = status
                    (out / f"{each.run.name}.status").write_text(f"{status}\n")
                    seconds = time.monotonic() - each.started
                    print(f"{each.run.name}: status {status} after {seconds:.0f} s", flush=True)
            time.sleep(POLL_S)
    finally:
        for each in running:
            each.end()
    return statuses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="a file of runs")
    parser.add_argument("--out", type=Path, required=True, help="folder of logs and results")
    parser.add_argument("--only", default="*", help="a pattern of names, such as 'grpo-*'")
    parser.add_argument("--for-s", type=float, default=float("inf"), help="seconds for all runs")
    parser.add_argument("--gpus", type=int, help="number of GPUs (default: all)")
    args: Any = parser.parse_args()
    if args.gpus is None:
        import torch

        args.gpus = torch.cuda.device_count()
    runs = read_runs(args.runs, args.only)
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the runs
    make(runs, args.gpus, args.out.resolve(), args.for_s)
    statuses = statuses_of(runs, args.out)
    left = [run.name for run in runs if run.name not in statuses]
    failed = [name for name, status in statuses.items() if status]
    print(f"made {len(statuses)}, of which failed: {', '.join(failed) or 'none'}")
    print(f"left for want of time or GPUs: {', '.join(left) or 'none'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
