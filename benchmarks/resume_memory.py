"""How long torch-memory-saver needs to unmap and map memory, by how long it was unmapped.

    python benchmarks/resume_memory.py --json FILE

The driver cleans memory that was unmapped before anybody gets it again, in the background; whoever
maps as much at once waits for that. Rows: `preload` and `torch` are the two ways in which
torch-memory-saver works, each in a process of its own; the memory is one allocation per gigabyte,
or as small as an engine's.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from verl_sglang_sync.bench.results_file import hardware, medians, print_table, write_results  # noqa: E402

MIB = 1 << 20
WAITS_S = (0.0, 0.05, 0.3, 1.0)
TAG = "weights"
RUNS = 5


def measure(mode: str, num: int, mib: int, held_mib: int) -> list[dict[str, Any]]:
    """Rows of one process: `num` allocations of `mib` MiB each, beside `held_mib` of others."""
    import torch
    from torch_memory_saver import torch_memory_saver as saver

    saver.hook_mode = mode
    held = [torch.empty(MIB, dtype=torch.uint8, device="cuda") for _ in range(held_mib)]
    with saver.region(tag=TAG, enable_cpu_backup=False):
        memory = [torch.empty(mib * MIB, dtype=torch.uint8, device="cuda") for _ in range(num)]
    rows = []
    for wait_s in WAITS_S:
        runs = []
        for _ in range(1 + RUNS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            saver.pause(TAG)
            released = time.perf_counter()
            time.sleep(wait_s)
            resumed = time.perf_counter()
            saver.resume(TAG)
            torch.cuda.synchronize()
            ended = time.perf_counter()
            runs.append({"release": released - started, "resume": ended - resumed})
        rows.append(
            {
                "arm": f"{mode}, {num} x {mib} MiB, {held_mib} MiB beside, {wait_s:g} s apart",
                "model": "-",
                "bytes": num * mib * MIB,
                "gpus": 1,
                "tp": 1,
                "runs": RUNS,
                "median_s": medians(runs[1:]),
                "runs_s": runs[1:],
            }
        )
    del memory, held
    return rows


def main() -> None:
    """Run all cases; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=int, default=59, help="how much is unmapped and mapped")
    parser.add_argument("--held-gib", type=int, default=61, help="what others hold meanwhile")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if shutil.which("nvidia-smi") is None:
        parser.exit(1, "needs an NVIDIA GPU\n")
    from torch_memory_saver import configure_subprocess

    rows: list[dict[str, Any]] = []
    for mode in ("preload", "torch"):
        for mib in (1024, 128):
            for held_mib in (0, args.held_gib * 1024):
                with (
                    configure_subprocess() if mode == "preload" else nullcontext(),
                    ProcessPoolExecutor(1, get_context("spawn")) as pool,
                ):
                    num = args.gib * 1024 // mib
                    rows += pool.submit(measure, mode, num, mib, held_mib).result()
    write_results(
        args.json or Path(f"benchmarks/results/resume_memory-{hardware()}.json"),
        "resume_memory",
        rows,
    )
    print_table(rows, ("release", "resume"))


if __name__ == "__main__":
    main()
