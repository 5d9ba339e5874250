"""Seconds of a weight sync between a trainer and engines on GPUs of their own.

    python benchmarks/disaggregated.py --models qwen3-8b qwen3-30b-a3b --json FILE     # two GPUs
    python benchmarks/disaggregated.py --trainers 2 --engine-tp 2                      # four GPUs
    python benchmarks/disaggregated.py --trainers 2 --replicas 2                       # four GPUs
    python benchmarks/disaggregated.py --models tiny --device cpu

The trainer's ranks, on the first GPUs, hold random weights of the model's shape under FSDP2; real
SGLang servers are on the next ones, a server for each replica. A sync lasts from the trainer's call
to the reply that makes the weights live (`verl_arms`). All arms run in one process against the same
servers, which start beside it; an arm that fails or takes too long is reported, and the others get
new ones. After each arm's first and last sync the weights of every engine rank are compared with
the trainer's, which change before every sync (`arrival`). `copy_limit` is what the wires allow
(`broadcast_limit`).
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(path) for path in (ROOT, ROOT / "tests", ROOT / "recipes", ROOT / "plugins")]
sys.path[:0] = PATHS

from benchmarks.arm import Setting  # noqa: E402
from benchmarks.arrival import ARRIVAL_LOADER, arrival_environment  # noqa: E402
from benchmarks.broadcast_limit import COPY_LIMIT  # noqa: E402
from benchmarks.verl_arms import NATIVE, VERL_ARMS  # noqa: E402
from verl_sglang_sync.commands.bench.engine_server import engine_server  # noqa: E402
from verl_sglang_sync.commands.bench.model_shapes import MODELS, write_config  # noqa: E402
from verl_sglang_sync.commands.bench.results_file import hardware, print_table, write_results  # noqa: E402

NAMES = (*VERL_ARMS, COPY_LIMIT)
STAGES = ("sync", "transfer", "group", "open", "export", "pack", "send", "load")
NCCL_ENVIRONMENT = {
    # SGLang sets it in its processes, and NCCL fails between processes that differ in it.
    "NCCL_CUMEM_ENABLE": "0",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}

Row = dict[str, Any]
Servers = dict[str, str]
"""URL of each replica's server, and its log."""


def measure(setting: Setting, arms: list[str]) -> Iterator[Row]:
    """Rows of one model; a failed arm's row has `error` instead of seconds."""
    pending = [arm for arm in arms if arm != COPY_LIMIT]
    if setting.device == "cpu" and NATIVE in pending:
        pending.remove(NATIVE)
        yield _failed(NATIVE, setting, "skipped: verl's backend nccl needs GPUs")
    number = 0
    while pending:
        number += 1
        with _servers(setting, number) as servers:
            for row in _run_verl(pending, setting, servers):
                pending.remove(row["arm"])
                yield row  # after a failure it is the last: the servers may be in any state
    if COPY_LIMIT in arms:
        yield from _run_limit(setting)


@contextlib.contextmanager
def _servers(setting: Setting, number: int) -> Iterator[Servers]:
    """The engines, which still start."""
    folder = Path(setting.folder)
    servers: Servers = {}
    with contextlib.ExitStack() as stack:
        for replica, arrived in enumerate(setting.arrival_folders):
            arrived.mkdir(exist_ok=True)
            log = folder / f"server-{setting.model}-{number}-{replica}.log"
            server = engine_server(
                write_config(folder / setting.model, setting.model),
                device=setting.device,
                host_backup="auto",
                is_moe="num_experts" in MODELS[setting.model],
                tp=setting.engine_tp,
                gpu_share=0.85,
                log=log,
                loaders=(ARRIVAL_LOADER,),
                environment={**_environment(setting, replica), **arrival_environment(arrived)},
                wait=False,
            )
            servers[stack.enter_context(server)] = str(log)
        yield servers


def _environment(setting: Setting, replica: int | None = None) -> dict[str, str]:
    """Of a replica's server, on its own GPUs; None: of a process that sees all."""
    path = os.pathsep.join(filter(None, (*PATHS, os.environ.get("PYTHONPATH"))))
    found = {**os.environ, **NCCL_ENVIRONMENT, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    if setting.device == "cpu":
        found |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
        if setting.engine_tp == 1:
            found.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "0")
    elif replica is not None:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, setting.engine_gpus(replica)))
    return found


def _run_verl(arms: list[str], setting: Setting, servers: Servers) -> Iterator[Row]:
    """Rows of verl's arms, in order, up to the first failure."""
    rows = _new_file(setting, "verl")
    arguments = [setting.as_json(), str(rows), json.dumps(arms), json.dumps(servers)]
    logs = [Path(log) for log in servers.values()]
    return _run(arms, setting, rows, [["benchmarks.verl_arms", *arguments]], logs)


def _run_limit(setting: Setting) -> Iterator[Row]:
    rows = _new_file(setting, COPY_LIMIT)
    arguments = [f"{rows}.store", setting.as_json(), str(rows)]
    commands = [["benchmarks.broadcast_limit", str(rank), *arguments] for rank in range(2)]
    return _run([COPY_LIMIT], setting, rows, commands, [])


def _new_file(setting: Setting, what: str) -> Path:
    file = Path(setting.folder, f"{setting.model}-{what}-{time.monotonic_ns()}.jsonl")
    file.touch()
    return file


def _run(
    arms: list[str], setting: Setting, rows: Path, commands: list[list[str]], logs: list[Path]
) -> Iterator[Row]:
    """Rows of the arms that some processes run together.

    Args:
        rows: where they write.
        commands: module and arguments of each.
        logs: what else tells why an arm failed.
    """
    processes = []
    with contextlib.ExitStack() as stack:
        for rank, command in enumerate(commands):
            log = rows.with_suffix(f".{rank}.log")
            logs = [*logs, log]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", *command],
                    env=_environment(setting),
                    cwd=ROOT,
                    stdout=stack.enter_context(log.open("wb")),
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
            stack.callback(_end, processes[-1])
        yield from _follow(arms, setting, processes, rows, logs)


def _follow(
    arms: list[str],
    setting: Setting,
    processes: list[subprocess.Popen[bytes]],
    rows: Path,
    logs: list[Path],
) -> Iterator[Row]:
    """Pass on the rows as they are written; end with a row for what fails, hangs or dies."""
    left, taken = list(arms), 0
    deadline = time.monotonic() + setting.start_timeout_s + setting.arm_timeout_s
    while left:
        is_over = all(process.poll() is not None for process in processes)
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
        if left and (is_over or time.monotonic() > deadline):
            what = "its process ended" if is_over else "took too long"
            tails = "\n".join(f"{log}:\n{_tail(log)}" for log in logs)
            yield _failed(left[0], setting, f"{what}\n{tails}")
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
    return {**setting.row(arm), "runs": 0, "median_s": none, "error": error}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["qwen3-8b"])
    parser.add_argument("--arms", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--trainers", type=int, default=1, help="ranks of the trainer, FSDP2")
    parser.add_argument("--engine-tp", type=int, default=1, help="ranks of each replica")
    parser.add_argument("--replicas", type=int, default=1, help="engines")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--bucket-mb", type=int, default=2048, help="verl's default is 2048")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--arm-timeout-s", type=float, default=120.0)
    parser.add_argument("--start-timeout-s", type=float, default=120.0)
    parser.add_argument("--folder", type=Path, help="logs; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for model in args.models:
        if (heads := MODELS[model]["num_key_value_heads"]) % args.engine_tp:
            parser.error(f"--engine-tp {args.engine_tp}: must divide {model}'s {heads} KV heads")
    return args


def main() -> None:
    """Run all arms of all models; see the module docstring."""
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as `timeout` ends it: servers end too
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="disaggregated-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    path = args.json or Path(f"benchmarks/results/disaggregated-{hardware()}.json")
    rows: list[Row] = []
    for model in args.models:
        setting = Setting(
            model=model,
            device=args.device,
            trainers=args.trainers,
            engine_tp=args.engine_tp,
            replicas=args.replicas,
            runs=args.runs,
            bucket_mb=args.bucket_mb,
            arm_timeout_s=args.arm_timeout_s,
            start_timeout_s=args.start_timeout_s,
            folder=str(folder),
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
