"""The limit of `disaggregated`: one collective broadcast between a trainer's and an engine's GPU.

    python -m benchmarks.broadcast_limit RANK STORE SETTING ROWS

What is broadcast is the most that any one GPU of the run must send or take in. A trainer rank, of
N, sends its part of the weights to each of R replicas: R / N of their bytes; an engine rank, of T,
takes in 1 / T. (What each rank has whole, as norms and routers, is a thousandth of that.) All GPUs
send and take in at the same time, each at the rate that is measured here between two of them.

Both ranks hold a buffer of at most 4 GiB and broadcast it as often as the bytes need. As a note, a
plain copy from GPU to GPU of the same bytes.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arm import Setting, write_row
from verl_sglang_sync.commands.bench.model_shapes import weights_bytes
from verl_sglang_sync.commands.bench.results_file import medians

COPY_LIMIT = "copy_limit"
BUFFER_BYTES = 4 << 30
NUM_WARM_UPS = 2


def main(rank: int, store: str, setting: Setting, rows: Path) -> None:
    """One rank; rank 0, on the trainer's first GPU, writes the row."""
    gpu = setting.engine_gpus(0)[0] if rank else 0
    place = torch.device("cpu") if setting.device == "cpu" else torch.device("cuda", gpu)
    if setting.device == "cuda":
        torch.cuda.set_device(place)
    backend = "gloo" if setting.device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    num_bytes = limit_bytes(setting)
    buffer = torch.empty(min(num_bytes, BUFFER_BYTES), dtype=torch.uint8, device=place)
    parts = _parts(num_bytes)

    def broadcast() -> None:
        for part in parts:
            dist.broadcast(buffer[:part], src=0)

    measured = [{"sync": seconds} for seconds in _timed(broadcast, setting.device, setting.runs)]
    if rank == 0:
        row: dict[str, Any] = {
            **setting.row(COPY_LIMIT),
            "bytes": num_bytes,
            "runs": setting.runs,
            "median_s": medians(measured),
            "runs_s": measured,
            "host_bytes": 0,
            "peak_extra_gpu_bytes": 0,
        }
        if setting.device == "cuda":
            target = torch.empty_like(buffer, device=f"cuda:{setting.engine_gpus(0)[0]}")
            row["peer_copy_s"] = _peer_copy(buffer, target, parts, setting.runs)
        write_row(rows, row)
    dist.barrier()
    dist.destroy_process_group()


def limit_bytes(setting: Setting) -> int:
    """The most bytes into or out of one GPU."""
    num_bytes = weights_bytes(setting.model, 4 if setting.device == "cpu" else 2)
    sent = num_bytes * setting.replicas / setting.trainers
    return math.ceil(max(sent, num_bytes / setting.engine_tp))


def _parts(num_bytes: int) -> list[int]:
    whole, rest = divmod(num_bytes, BUFFER_BYTES)
    return [BUFFER_BYTES] * whole + ([rest] if rest else [])


def _timed(step: Callable[[], None], device: str, runs: int) -> list[float]:
    seconds = []
    for _ in range(NUM_WARM_UPS + runs):
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[NUM_WARM_UPS:]


def _peer_copy(buffer: torch.Tensor, target: torch.Tensor, parts: list[int], runs: int) -> float:
    measured = []
    for _ in range(NUM_WARM_UPS + runs):
        torch.cuda.synchronize(buffer.device)
        started = time.perf_counter()
        for part in parts:
            target[:part].copy_(buffer[:part], non_blocking=True)
        torch.cuda.synchronize(buffer.device)
        torch.cuda.synchronize(target.device)
        measured.append({"sync": time.perf_counter() - started})
    return medians(measured[NUM_WARM_UPS:])["sync"]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Setting.from_json(sys.argv[3]), Path(sys.argv[4]))
