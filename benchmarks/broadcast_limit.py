"""The limit of `disaggregated`: one collective broadcast of the same bytes between the same GPUs.

    python -m benchmarks.broadcast_limit RANK STORE DEVICE RUNS ROWS MODEL=BYTES ...

Both ranks hold a buffer of at most 4 GiB and broadcast it as often as the bytes need. As a note, a
plain copy from GPU to GPU of the same bytes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl_sglang_sync.bench.results_file import medians

BUFFER_BYTES = 4 << 30
NUM_WARM_UPS = 2


def main(rank: int, store: str, device: str, runs: int, rows: Path, sizes: dict[str, int]) -> None:
    """One rank; rank 0 writes the rows."""
    place = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
    if device == "cuda":
        torch.cuda.set_device(place)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    for model, num_bytes in sizes.items():
        buffer = torch.empty(min(num_bytes, BUFFER_BYTES), dtype=torch.uint8, device=place)
        parts = _parts(num_bytes)

        def broadcast(buffer: torch.Tensor = buffer, parts: list[int] = parts) -> None:
            for part in parts:
                dist.broadcast(buffer[:part], src=0)

        measured = [{"sync": seconds} for seconds in _timed(broadcast, device, runs)]
        if rank == 0:
            row: dict[str, Any] = {
                "arm": "copy_limit",
                "model": model,
                "gpus": 2 if device == "cuda" else 0,
                "tp": 1,
                "bytes": num_bytes,
                "runs": runs,
                "median_s": medians(measured),
                "runs_s": measured,
                "host_bytes": 0,
                "peak_extra_gpu_bytes": 0,
            }
            if device == "cuda":
                row["peer_copy_s"] = _peer_copy(buffer, parts, runs)
            with rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
        dist.barrier()
    dist.destroy_process_group()


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


def _peer_copy(buffer: torch.Tensor, parts: list[int], runs: int) -> float:
    target = torch.empty_like(buffer, device="cuda:1")
    measured = []
    for _ in range(NUM_WARM_UPS + runs):
        torch.cuda.synchronize(0)
        started = time.perf_counter()
        for part in parts:
            target[:part].copy_(buffer[:part], non_blocking=True)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        measured.append({"sync": time.perf_counter() - started})
    return medians(measured[NUM_WARM_UPS:])["sync"]


if __name__ == "__main__":
    rank, store, device, runs, rows, *sizes = sys.argv[1:]
    pairs = (size.split("=") for size in sizes)
    main(int(rank), store, device, int(runs), Path(rows), {m: int(n) for m, n in pairs})
