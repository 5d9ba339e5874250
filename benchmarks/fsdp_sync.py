"""`colocated` for several GPUs: an FSDP2 trainer over all of them, engines on the same ones.

Called by `colocated.py --gpus N --tp T`: N trainer ranks, N / T engines of T ranks each. The
sync's seconds include the export (gather and unfuse). Arms besides `native` and the presets:
`compiled_gathered` gathers all weights on every rank where `compiled` exchanges shards,
`export_only` runs the export to its end, `all_gather_limit` gathers the same bytes in flat pieces,
and `all_to_all_limit` gives each rank only its part of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.fsdp_rank import measure_rank
from support.trainer import Ranks
from verl_sglang_sync.bench.engine_server import engine_server, wait_until_healthy
from verl_sglang_sync.bench.model_shapes import MODELS, write_config
from verl_sglang_sync.bench.results_file import medians

ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0"}  # SGLang's own; a mixture fails in CUDA
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
TIMEOUT_S = 900


@contextmanager
def engines_on(
    config: Path, model: str, num_ranks: int, tp: int, device: str, folder: Path
) -> Iterator[list[str]]:
    """Engines of `tp` ranks each, one behind the other on the trainer ranks' GPUs: their URLs."""
    os.environ.update(ENVIRONMENT if device == "cuda" else CPU_ENVIRONMENT)
    firsts = range(0, num_ranks, tp)
    logs = {first: folder / f"server-{model}-tp{tp}-{first}.log" for first in firsts}
    with ExitStack() as stack:
        urls = [
            stack.enter_context(
                engine_server(
                    config,
                    device=device,
                    host_backup="auto",
                    is_moe="num_experts" in MODELS[model],
                    log=log,
                    tp=tp,
                    first_gpu=first,
                    wait=False,
                )
            )
            for first, log in logs.items()
        ]
        started = time.perf_counter()
        for url, log in zip(urls, logs.values(), strict=True):
            wait_until_healthy(url, log)
        print(f"{len(urls)} engines of {model}: {time.perf_counter() - started:.0f} s", flush=True)
        yield urls


def measure_on_gpus(
    model: str, arms: list[str], gpus: int, tp: int, runs: int, device: str, folder: Path
) -> list[dict[str, Any]]:
    """Rows of one model on `gpus` GPUs, with engines of `tp` ranks."""
    config = write_config(folder / model, model)
    lines = folder / f"arms-{model}-{gpus}-{tp}.jsonl"
    lines.unlink(missing_ok=True)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    with (
        engines_on(config, model, gpus, tp, device, folder) as urls,
        Ranks(folder, urls, tp=tp, device=device, backend=backend) as ranks,
    ):
        args = model, str(config), arms, runs, str(lines)
        outcomes = ranks.attempt(measure_rank, *args, limit_s=TIMEOUT_S)
    for outcome in outcomes:
        if outcome.error is not None:
            print(outcome.error, file=sys.stderr)  # the arms before it have been measured
    measured = lines.read_text().splitlines() if lines.exists() else []
    return [row_of(json.loads(line), model, gpus, tp) for line in measured]


def row_of(seen: dict[str, Any], model: str, gpus: int, tp: int) -> dict[str, Any]:
    """One arm, as the first rank saw it."""
    runs = seen["runs_s"]
    return {
        "model": model,
        "gpus": gpus,
        "tp": tp,
        "runs": len(runs),
        "median_s": medians(runs),
        "host_bytes": 0,
        **seen,
    }
