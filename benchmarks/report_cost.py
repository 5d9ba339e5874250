"""What reporting a sync costs: its stages timed, the log line, the JSON line and the metrics.

    python benchmarks/report_cost.py --json FILE

Goes through `SyncReport` as a `compiled` sync of qwen3-8b does, whose parameters are read in place
(8 buckets), with nothing between the calls. Seconds of this process's processor; an H200 takes
11 to 13 ms for the sync itself. The two calls of the server's Ray actor by which verl's step gets
the metrics come after the sync, and are not in it.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

from sglang_loader.common.replies import StageCosts
from verl_sglang_sync.commands.bench.results_file import medians, write_results
from verl_sglang_sync.report import SyncReport

NUM_BUCKETS, NUM_TENSORS, NUM_BYTES = 8, 399, 16_381_470_720
ONE_TAG: StageCosts = {"weights": {"seconds": [0.02], "gpu_bytes": [NUM_BYTES], "host_bytes": [0]}}
STAGES = ("open", "confirm", "open", "load", "publish", "learn")


def report_one(file: Path) -> None:
    """All that is reported of one sleep, wake-up and sync."""
    report = SyncReport(mode="compiled", replica=0)
    for stage in ("release", "resume_weights", "resume_kv_cache", "reply"):
        with report.stage(stage):
            report.add_costs(stage, ONE_TAG)
    with report.stage("sync"):
        for stage in STAGES:
            with report.stage(stage):
                pass
        for _ in range(NUM_BUCKETS):
            report.count_bucket(NUM_TENSORS // NUM_BUCKETS, NUM_BYTES // NUM_BUCKETS)
            report.num_pulled += 1
    report.num_replayed, report.weight_version = NUM_BUCKETS, "7"
    report.write(str(file))
    report.metrics()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    measured: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        logging.basicConfig(filename=Path(folder) / "log", level=logging.INFO)
        for _ in range(arguments.runs):
            started = time.process_time()
            report_one(Path(folder) / "syncs.jsonl")
            measured.append({"report": time.process_time() - started})
    row: dict[str, Any] = {
        "arm": "report",
        "model": "qwen3-8b",
        "num_tensors": NUM_TENSORS,
        "bytes": NUM_BYTES,
        "gpus": 0,
        "tp": 1,
        "runs": len(measured),
        "median_s": medians(measured),
        "fastest_s": min(run["report"] for run in measured),
    }
    median_s = row["median_s"]["report"]
    print(f"fastest {row['fastest_s'] * 1e6:.0f} us, median {median_s * 1e6:.0f} us")
    if arguments.json:
        write_results(arguments.json, "report_cost", [row])


if __name__ == "__main__":
    main()
