"""Seconds of a colocated weight sync and of its memory stages, every arm against a real SGLang.

    python benchmarks/colocated.py --models qwen3-8b qwen3-30b-a3b --runs 5 --json FILE
    python benchmarks/colocated.py --models qwen3-30b-a3b --gpus 4 --tp 4      # see ranks
    python benchmarks/colocated.py --models moe-110b --gpus 4 --tp 4 --sleeps --arms compiled
    python benchmarks/colocated.py --models qwen3-8b --gpus 2 --tp 2 --offload     # param_offload
    python benchmarks/colocated.py --models tiny --device cpu

See `verl_sglang_sync.commands.bench`: `colocated` says what is measured, `arms` what each arm is.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(path) for path in (ROOT, ROOT / "tests", ROOT / "plugins")]
sys.path[:0] = PATHS

import torch  # noqa: E402

from benchmarks import ranks  # noqa: E402
from support.trainer import TrainerRank  # noqa: E402
from verl_sglang_sync.commands.bench.arms import (  # noqa: E402
    ARMS,
    COPY_LIMIT,
    HOST_COPY_LIMIT,
)
from verl_sglang_sync.commands.bench.colocated import ASLEEP_S, STAGES, measure  # noqa: E402
from verl_sglang_sync.commands.bench.model_shapes import MODELS, write_config  # noqa: E402
from verl_sglang_sync.commands.bench.results_file import hardware, print_table, write_results  # noqa: E402
from verl_sglang_sync.commands.bench.trainers import ShardedModel  # noqa: E402


def exporter(model: str, is_offloaded: bool) -> Callable[[TrainerRank], ranks.Export]:
    """Makes a rank's share of the model, which it then exports."""
    return lambda rank: ShardedModel(model, rank.device, is_offloaded=is_offloaded).reexport


def main() -> None:
    """Run all arms of all models; see the module docstring."""
    names = [*ARMS, COPY_LIMIT, HOST_COPY_LIMIT]
    on_gpus = [ranks.NATIVE, *ranks.OURS, ranks.EXPORT_ONLY, *ranks.LIMITS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["qwen3-8b"])
    parser.add_argument("--arms", nargs="+", help=f"default: all of {names}, or {on_gpus}")
    parser.add_argument("--gpus", type=int, default=1, help="trainer ranks; more than 1: FSDP2")
    parser.add_argument("--tp", type=int, default=1, help="of each engine")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--offload", action="store_true", help="parameters are on the host")
    parser.add_argument("--asleep-s", type=float, default=ASLEEP_S, help="before a sync")
    parser.add_argument("--sleeps", action="store_true", help="also on several GPUs")
    parser.add_argument(
        "--gpus-per-host", type=int, default=1, help=f"of {ranks.APART}; default: %(default)s"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, help="server logs; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    allowed = names if args.gpus == 1 else on_gpus
    if wrong := set(args.arms or ()) - set(allowed):
        parser.error(f"arms {sorted(wrong)} with --gpus {args.gpus}; allowed: {allowed}")
    arms = args.arms or allowed
    if args.sleeps and args.gpus == 1:
        parser.error("--sleeps with --gpus 1: engines sleep there in any case, leave it out")
    if args.sleeps and len(arms) > 1 and ranks.NATIVE in arms:
        parser.error(f"--sleeps: {ranks.NATIVE} has engines of its own, give it alone to --arms")
    if args.gpus % args.tp or args.gpus < args.tp:
        parser.error(f"--tp {args.tp}: must divide --gpus {args.gpus}")
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    folder = args.folder or Path(tempfile.mkdtemp(prefix="colocated-"))
    folder.mkdir(parents=True, exist_ok=True)
    path = args.json or Path(f"benchmarks/results/colocated-{hardware()}.json")
    rows: list[dict[str, Any]] = []
    if args.gpus > 1:
        os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
        for model in args.models:
            rows += ranks.measure(
                exporter(model, args.offload),
                arms,
                model=model,
                config=write_config(folder / model, model),
                ranks=args.gpus,
                tp=args.tp,
                runs=args.runs,
                device=args.device,
                folder=folder,
                gpus_per_host=args.gpus_per_host,
                asleep_s=args.asleep_s if args.sleeps else None,
            )
            for row in rows:
                row["is_offloaded"] = args.offload
            write_results(path, "colocated", rows)
        print_table(rows, STAGES if args.sleeps else ("sync",))
        missing = {(model, arm) for model in args.models for arm in arms} - {
            (row["model"], row["arm"]) for row in rows
        }
        if missing:
            parser.exit(1, f"not measured: {sorted(missing)}\n")
        return
    for model, arm in itertools.product(args.models, arms):
        started = time.perf_counter()
        rows.append(measure(model, arm, device, args.runs, folder, args.asleep_s, args.offload))
        print(f"{model} {arm}: {time.perf_counter() - started:.0f} s", flush=True)
        write_results(path, "colocated", rows)  # a run that is cut short leaves what it has
    print_table(rows, STAGES)


if __name__ == "__main__":
    main()
