"""Seconds of a weight sync between a trainer and an engine on GPUs of their own.

    python benchmarks/disaggregated.py --models qwen3-8b qwen3-30b-a3b --json FILE     # two GPUs
    python benchmarks/disaggregated.py --models tiny --device cpu

The trainer, on GPU 0, holds random weights of the model's shape; a real SGLang server is on GPU 1.
A sync lasts from the trainer's call to the reply that makes the weights live. All arms run against
one server, each in a process of its kind (`group_arms`, `verl_arms`, `broadcast_limit`); an arm
that fails or takes too long is reported, and the others get a new server. After each arm the
engine's weights are compared with the trainer's, which change before every sync (`arrival`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(path) for path in (ROOT, ROOT / "tests", ROOT / "plugins")]
sys.path[:0] = PATHS

from benchmarks.arm import ENGINE_GPU, TRAINER_GPU  # noqa: E402
from benchmarks.arrival import ARRIVAL_LOADER, arrival_environment  # noqa: E402
from benchmarks.group_arms import GROUP_ARMS  # noqa: E402
from benchmarks.verl_arms import VERL_ARMS  # noqa: E402
from verl_sglang_sync.bench.engine_server import engine_server  # noqa: E402
from verl_sglang_sync.bench.model_shapes import MODELS, tensor_shapes, write_config  # noqa: E402
from verl_sglang_sync.bench.results_file import hardware, print_table, write_results  # noqa: E402

COPY_LIMIT = "copy_limit"
NAMES = (*GROUP_ARMS, *VERL_ARMS, COPY_LIMIT)
STAGES = ("sync", "export", "pack", "send", "load", "group", "transfer")
PER_TENSOR_LIMIT = 2000  # tensors; more take minutes
NCCL_ENVIRONMENT = {
    # SGLang sets it in its processes, and NCCL fails between processes that differ in it.
    "NCCL_CUMEM_ENABLE": "0",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One model's run.

    Attributes:
        model: its shape.
        device: "cuda" or "cpu".
        runs: measured syncs of each arm.
        bucket_mb: size of a bucket, in MiB.
        arm_timeout_s: limit of one arm.
        start_timeout_s: of imports, weights and the server's start, on top of the first arm's.
        folder: logs, rows and the config.
    """

    model: str
    device: str
    runs: int
    bucket_mb: int
    arm_timeout_s: float
    start_timeout_s: float
    folder: Path

    def environment(self, gpu: int | None) -> dict[str, str]:
        """Of a process on one GPU; None: it sees all."""
        path = os.pathsep.join(filter(None, (*PATHS, os.environ.get("PYTHONPATH"))))
        found = {**os.environ, **NCCL_ENVIRONMENT, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        if self.device == "cpu":
            found |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
            found.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "0")
        elif gpu is not None:
            found["CUDA_VISIBLE_DEVICES"] = str(gpu)
        return found


def measure(setting: Setting, arms: list[str]) -> Iterator[Row]:
    """Rows of one model; a failed arm's row has `error` instead of seconds."""
    pending = []
    for arm in arms:
        reason = _skip_reason(arm, setting)
        if reason is None:
            pending.append(arm)
        else:
            yield _failed(arm, setting, f"skipped: {reason}")
    number = 0
    while pending:
        number += 1
        with _server(setting, number) as (url, log):
            while pending:
                batch = _same_kind(pending)
                failed = False
                for row in _run_batch(batch, setting, url, log):
                    pending.remove(row["arm"])
                    failed = "error" in row
                    yield row
                if failed:
                    break  # the server may be in any state


def _skip_reason(arm: str, setting: Setting) -> str | None:
    num_tensors = sum(1 for _ in tensor_shapes(MODELS[setting.model]))
    if arm == "per_tensor" and num_tensors > PER_TENSOR_LIMIT:
        return f"{num_tensors} tensors, one request each, take minutes"
    if arm == "verl_nccl" and setting.device == "cpu":
        return "verl's backend nccl needs GPUs"
    return None


def _same_kind(pending: list[str]) -> list[str]:
    """The arms at the head of the list that one process can run."""
    kinds = [_module(arm) for arm in pending]
    stop = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), len(kinds))
    return pending[:stop]


def _module(arm: str) -> str:
    if arm == COPY_LIMIT:
        return "benchmarks.broadcast_limit"
    return "benchmarks.verl_arms" if arm in VERL_ARMS else "benchmarks.group_arms"


@contextlib.contextmanager
def _server(setting: Setting, number: int) -> Iterator[tuple[str, Path]]:
    log = setting.folder / f"server-{setting.model}-{number}.log"
    with engine_server(
        write_config(setting.folder / setting.model, setting.model),
        device=setting.device,
        host_backup="auto",
        is_moe="num_experts" in MODELS[setting.model],
        gpu_share=0.85,
        log=log,
        loaders=(ARRIVAL_LOADER,),
        environment={
            **setting.environment(ENGINE_GPU),
            **arrival_environment(setting.folder),
        },
        wait=False,
    ) as url:
        yield url, log


def _run_batch(arms: list[str], setting: Setting, url: str, log: Path) -> Iterator[Row]:
    """Rows of the arms of one process, in order, up to the first failure."""
    stem = f"{setting.model}-{arms[0]}-{time.monotonic_ns()}"
    rows = setting.folder / f"{stem}.jsonl"
    rows.touch()
    commands = _commands(arms, setting, url, log, rows, setting.folder / f"{stem}.store")
    processes = []
    with contextlib.ExitStack() as stack:
        for rank, (command, gpu) in enumerate(commands):
            output = stack.enter_context((setting.folder / f"{stem}-{rank}.log").open("wb"))
            processes.append(
                subprocess.Popen(
                    command,
                    env=setting.environment(gpu),
                    cwd=ROOT,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
            stack.callback(_end, processes[-1])
        yield from _follow(arms, setting, processes, rows, setting.folder / f"{stem}-0.log")


def _commands(
    arms: list[str], setting: Setting, url: str, log: Path, rows: Path, store: Path
) -> list[tuple[list[str], int | None]]:
    """Command and GPU of each process."""
    module = [sys.executable, "-m", _module(arms[0])]
    if arms == [COPY_LIMIT]:
        num_bytes = sum(
            _numel(shape) * (4 if setting.device == "cpu" else 2)
            for _, shape in tensor_shapes(MODELS[setting.model])
        )
        common = [str(store), setting.device, str(setting.runs), str(rows)]
        size = f"{setting.model}={num_bytes}"
        return [([*module, str(rank), *common, size], None) for rank in range(2)]
    command = [
        *(*module, "--arms", *arms, "--model", setting.model, "--device", setting.device),
        *("--url", url, "--folder", str(setting.folder), "--server-log", str(log)),
        *("--rows", str(rows), "--runs", str(setting.runs)),
        *("--bucket-mb", str(setting.bucket_mb)),
    ]
    is_verl = arms[0] in VERL_ARMS  # Ray hands out the GPUs
    return [(command, None if is_verl else TRAINER_GPU)]


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _follow(
    arms: list[str],
    setting: Setting,
    processes: list[subprocess.Popen[bytes]],
    rows: Path,
    log: Path,
) -> Iterator[Row]:
    """Pass on the rows as they are written; end with a row for what hangs or dies."""
    left, taken = list(arms), 0
    deadline = time.monotonic() + setting.start_timeout_s + setting.arm_timeout_s
    while left:
        is_over = any(process.poll() is not None for process in processes)
        text = rows.read_text()
        whole = text[: text.rfind("\n") + 1]  # the last line may be half written
        lines = [json.loads(line) for line in whole.splitlines()]
        for line in lines[taken:]:
            taken += 1
            deadline = time.monotonic() + setting.arm_timeout_s
            if "started" in line:
                continue
            left.remove(line["arm"])
            if "error" in line:
                yield _failed(line["arm"], setting, line["error"])
                return
            yield line
        if not left:
            break
        if is_over and all(process.poll() is not None for process in processes):
            yield _failed(left[0], setting, f"its process ended:\n{_tail(log)}")
            return
        if time.monotonic() > deadline:
            yield _failed(left[0], setting, f"took too long:\n{_tail(log)}")
            return
        time.sleep(0.2)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what this benchmark started, with its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _failed(arm: str, setting: Setting, error: str) -> Row:
    print(f"{setting.model} {arm}: {error}", flush=True)
    none: dict[str, float] = {}
    row = {"arm": arm, "model": setting.model, "gpus": 2 if setting.device == "cuda" else 0}
    return {**row, "tp": 1, "runs": 0, "median_s": none, "error": error}


def main() -> None:
    """Run all arms of all models; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["qwen3-8b"])
    parser.add_argument("--arms", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--bucket-mb", type=int, default=2048, help="verl's default is 2048")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--arm-timeout-s", type=float, default=120.0)
    parser.add_argument("--start-timeout-s", type=float, default=120.0)
    parser.add_argument("--folder", type=Path, help="logs; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="disaggregated-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    path = args.json or Path(f"benchmarks/results/disaggregated-{hardware()}.json")
    rows: list[Row] = []
    for model in args.models:
        setting = Setting(
            model=model,
            device=args.device,
            runs=args.runs,
            bucket_mb=args.bucket_mb,
            arm_timeout_s=args.arm_timeout_s,
            start_timeout_s=args.start_timeout_s,
            folder=folder,
        )
        started = time.perf_counter()
        for row in measure(setting, args.arms):
            rows.append(row)
            write_results(path, "disaggregated", rows)  # a run that is cut short leaves what it has
            spent = time.perf_counter() - started
            print(f"{spent:5.0f} s {model} {row['arm']}: {row['median_s']}", flush=True)
    print_table(rows, STAGES)


if __name__ == "__main__":
    main()
