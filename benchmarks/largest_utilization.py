"""The largest `rollout.gpu_memory_utilization` with which a GRPO step runs, by stages of wake-up.

    python benchmarks/largest_utilization.py --model qwen3-4b --time-limit-s 1500 --json FILE

What the engine's share leaves must hold what the trainer has on the GPU while the KV cache is
mapped. The trainer's parameters are offloaded (`param_offload`), and FSDP1's come back for the
export, in float32: with one stage beside the KV cache, with two before it, which is then mapped
when they have left. verl's own sync always has two stages. FSDP2's (`--trainer fsdp2`) are exported
one by one, also with a merged LoRA adapter, and one stage costs no more than the staging buffers.

Shares are multiples of `--grid`. The search starts from an estimate, and its runs are full runs of
`recipes/grpo_fsdp_gpu.sh`; each result is written as soon as there is one.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from benchmarks import grpo_step  # noqa: E402
from benchmarks.gpu_memory import used_bytes  # noqa: E402
from verl_sglang_sync.commands.bench.model_shapes import MODELS, weights_bytes  # noqa: E402
from verl_sglang_sync.commands.bench.results_file import hardware, print_table, write_results  # noqa: E402

ARMS = {
    "native": ("native", True),
    "two-stage": ("compiled", True),
    "one-stage": ("compiled", False),
}
"""Preset, and `multi_stage_wake_up`."""

OFFLOAD = (
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
)
TRAINERS = {
    "fsdp1": (*OFFLOAD, "actor_rollout_ref.actor.strategy=fsdp"),
    "fsdp2": OFFLOAD,
}
SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"
STAGES = "actor_rollout_ref.rollout.multi_stage_wake_up"
NUM_STEPS = 2
LOWEST, HIGHEST = 0.3, 0.98
BUCKETS_BYTES = 2 * 2048 << 20  # staging buffers, of verl's default size
RESERVE_BYTES = 6e9  # CUDA contexts, the engine's graphs and activations
MASTER_ITEMSIZE = 4  # verl keeps parameters in float32
SHORTEST_RUN_S = 60
FREED_WITHIN_S = 60
SLACK_BYTES = 1 << 30

OUT_OF_MEMORY = re.compile(
    r".*(?:out of memory|OutOfMemoryError|OUT_OF_MEMORY|Not enough memory"
    r"|leave no GPU memory|MB more than are free).*"
)
ERROR = re.compile(r".*(?:\w+Error|Exception)\b: .*")
HOST_MEMORY = re.compile(r".*running low on memory.*")


class TimeIsUp(Exception):
    """The benchmark's limit leaves no time for another run."""


@dataclass
class Run:
    """One training run.

    Attributes:
        utilization: the engine's share.
        ended: "ok", "out of memory", or "error".
        why: the line of its log that says so.
        seconds: of the whole run.
        num_steps: those that were done.
        peak_bytes: in use on the GPU over the last step.
        result: see `grpo_step.row_of`.
    """

    utilization: float
    ended: str
    why: str = ""
    seconds: float = 0.0
    num_steps: int = 0
    peak_bytes: int = 0
    result: dict[str, Any] = field(default_factory=dict)


def largest(works: Callable[[int], bool], start: int, lowest: int, highest: int) -> int | None:
    """The largest number up to which `works` holds; None: it holds for none from `lowest` on.

    Steps from `start` double until a number works and a larger one does not.
    """
    good, bad, at, step = lowest - 1, highest + 1, start, 1
    while bad - good > 1:
        if works(at):
            good = at
        else:
            bad = at
        if lowest <= good and bad <= highest:
            at = (good + bad) // 2
        else:
            at = min(at + step, highest) if lowest <= good else max(at - step, lowest)
            step *= 2
    return good if good >= lowest else None


def why_failed(log: str) -> tuple[str, str]:
    """How a run ended that failed, and the line that says so."""
    if found := HOST_MEMORY.search(log):
        return "error", found[0].strip()
    if found := OUT_OF_MEMORY.search(log):
        return "out of memory", found[0].strip()
    errors = ERROR.findall(log)
    return "error", errors[-1].strip() if errors else log.strip()[-500:]


def estimate(arm: str, trainer: str, model: str, gpu_bytes: int) -> float:
    """The share that should just work."""
    beside = RESERVE_BYTES
    if not ARMS[arm][1]:
        beside += BUCKETS_BYTES
        # On one GPU FSDP1 copies the whole state that it hands out.
        beside += 2 * weights_bytes(model, MASTER_ITEMSIZE) if trainer == "fsdp1" else 0
    return 1 - beside / gpu_bytes


class Search:
    """One arm's runs.

    Args:
        arm: one of `ARMS`.
        args: the command line.
        deadline: `time.monotonic()` at which the benchmark ends.
        write: called after each run.
    """

    def __init__(
        self, arm: str, args: argparse.Namespace, deadline: float, write: Callable[[], None]
    ) -> None:
        self._arm, self._args, self._deadline, self._write = arm, args, deadline, write
        self.runs: list[Run] = []

    def go(self, start: float) -> None:
        """Search from a share on.

        Raises:
            TimeIsUp: before the end.
            RuntimeError: a run ended neither well nor for want of GPU memory.
        """
        grid = self._args.grid
        lowest, highest = round(LOWEST / grid), int(HIGHEST / grid + 1e-6)
        first = min(max(int(start / grid), lowest), highest)
        largest(self._works, first, lowest, highest)

    def row(self) -> dict[str, Any]:
        """What is known by now; `largest` and `smallest_failed` bracket it."""
        good = [run for run in self.runs if run.ended == "ok"]
        bad = [run.utilization for run in self.runs if run.ended == "out of memory"]
        best = max(good, key=lambda run: run.utilization, default=None)
        return {
            "arm": self._arm,
            "model": self._args.model,
            "gpus": 1,
            "tp": 1,
            "trainer": self._args.trainer,
            "multi_stage_wake_up": ARMS[self._arm][1],
            "largest": best.utilization if best else None,
            "smallest_failed": min(bad, default=None),
            "median_s": best.result["median_s"] if best else {},
            "runs": [asdict(run) for run in self.runs],
        }

    def _works(self, number: int) -> bool:
        left = self._deadline - time.monotonic()
        if left < max([SHORTEST_RUN_S, *(run.seconds for run in self.runs)]):
            raise TimeIsUp
        before = used_bytes([0])[0]
        run = self._run(round(number * self._args.grid, 4), min(left, self._args.run_limit_s))
        self.runs.append(run)
        print(f"{self._arm}: {run.utilization}: {run.ended} in {run.seconds:.0f} s {run.why}")
        self._write()
        _wait_until_freed(before)  # after an error, too: the next arm begins
        if run.ended == "error":
            raise RuntimeError(f"{self._arm} at {run.utilization}: {run.why}")
        return run.ended == "ok"

    def _run(self, utilization: float, limit_s: float) -> Run:
        folder = self._args.folder
        preset, multi_stage = ARMS[self._arm]
        more = (
            *TRAINERS[self._args.trainer],
            *self._args.overrides,
            f"{SHARE}={utilization}",
            f"{STAGES}={multi_stage}",
        )
        log = folder / f"run-{preset}.log"
        run, started = Run(utilization, "ok"), time.monotonic()
        try:
            steps, memory = grpo_step.run_arm(preset, folder, NUM_STEPS, more, limit_s=limit_s)
            stages = grpo_step.stage_medians(folder, preset)
            run.result = grpo_step.row_of(self._arm, self._args.model, steps, stages)
            run.num_steps, run.peak_bytes = len(steps), int(max(memory["megabytes"])) * 1_000_000
        except (RuntimeError, subprocess.TimeoutExpired) as failed:
            run.ended, run.why = why_failed(log.read_text(errors="replace"))
            if isinstance(failed, subprocess.TimeoutExpired):
                run.why = f"killed after {limit_s:.0f} s; {run.why}"
            metrics = folder / f"metrics-{preset}.jsonl"
            run.num_steps = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        run.seconds = time.monotonic() - started
        shutil.copy(log, folder / f"run-{self._arm}-{utilization}.log")
        return run


def _wait_until_freed(before: int) -> None:
    """What a run had is the next one's."""
    deadline = time.monotonic() + FREED_WITHIN_S
    while (used := used_bytes([0])[0]) > before + SLACK_BYTES:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{used / 1e9:.1f} GB are in use, {before / 1e9:.1f} before the run")
        time.sleep(0.5)


def main() -> None:
    """Search for all arms; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen3-4b")
    parser.add_argument("--trainer", choices=TRAINERS, default="fsdp1")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=["one-stage", "two-stage", "native"]
    )
    parser.add_argument("--grid", type=float, default=0.02)
    parser.add_argument("--time-limit-s", type=float, default=1500, help="for all arms")
    parser.add_argument("--run-limit-s", type=float, default=600, help="for each run")
    parser.add_argument("--folder", type=Path, default=Path("outputs/largest_utilization"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="of verl's settings, for all arms")
    args = parser.parse_args()
    import torch

    deadline = time.monotonic() + args.time_limit_s
    args.folder = args.folder.resolve() / args.model
    if not list((args.folder / "model").glob("*.safetensors")):
        grpo_step.make_model(args.folder, args.model)
    path = args.json or Path(f"benchmarks/results/largest_utilization-{hardware()}.json")
    gpu_bytes = torch.cuda.get_device_properties(0).total_memory
    searches: list[Search] = []

    def write() -> None:
        write_results(path, "largest_utilization", [search.row() for search in searches])

    for arm in args.arms:
        searches.append(Search(arm, args, deadline, write))
        try:
            searches[-1].go(estimate(arm, args.trainer, args.model, gpu_bytes))
        except TimeIsUp:
            print(f"{arm}: the time is up")
            break
        except RuntimeError as error:
            print(f"{arm} is left: {error}")
    write()
    for search in searches:
        row = search.row()
        print(f"{row['arm']}: {row['largest']} works, {row['smallest_failed']} does not")
    print_table([search.row() for search in searches], grpo_step.TIMERS)


if __name__ == "__main__":
    main()
