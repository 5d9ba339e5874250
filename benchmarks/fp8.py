"""Seconds and bytes of a colocated sync of an engine in fp8: exported, and quantised by the engine.

    python benchmarks/fp8.py --models qwen3-8b qwen3-30b-a3b --gpus 2 --tp 2 --json FILE

`exported`: verl's quantiser on every trainer rank makes each weight, packed into staging buffers.
`table`: engine ranks read the trainer's bfloat16 shards, and quantise what they read. `exchanged`:
the same bytes are sent in rounds. All arms run in one run, one after the other; see `ranks`.

Columns of bytes: `bytes` of the weights in fp8 with their scales, and `bytes_before` of the same
weights in bfloat16. Exported, every trainer rank gathers `bytes_before`, and the engine ranks read
`bytes`. By the table, the engine ranks of an engine read `bytes_before` once, together.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(path) for path in (ROOT, ROOT / "tests", ROOT / "plugins")]
sys.path[:0] = PATHS

import torch  # noqa: E402

from benchmarks import ranks  # noqa: E402
from support.served_models import model_override, quantizer  # noqa: E402
from support.trainer import TrainerRank  # noqa: E402
from verl_sglang_sync.commands.bench.model_shapes import (  # noqa: E402
    MODELS,
    weights_bytes,
    write_config,
)
from verl_sglang_sync.commands.bench.results_file import (  # noqa: E402
    hardware,
    print_table,
    write_results,
)
from verl_sglang_sync.commands.bench.trainers import ShardedModel  # noqa: E402
from verl_sglang_sync.verl.engine_format import quantized_by  # noqa: E402

ARMS = {
    "exported": "compiled_gathered",
    "table": "compiled",
    "exchanged": "compiled_exchanged",
}
"""The names of the arms in `ranks`."""


def exporter(model: str) -> Callable[[TrainerRank], ranks.Export]:
    """Makes a rank's share of the model, which it then exports in fp8."""

    def make(rank: TrainerRank) -> ranks.Export:
        sharded = ShardedModel(model, rank.device, torch.bfloat16)
        return lambda: quantized_by(sharded.reexport(), quantizer(), torch.bfloat16)

    return make


def main() -> None:
    """Run all arms of all models; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["qwen3-8b"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["exported", "table"])
    parser.add_argument("--gpus", type=int, default=1, help="trainer ranks, with FSDP2")
    parser.add_argument("--tp", type=int, default=1, help="of each engine")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="server logs; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="fp8-"))
    folder.mkdir(parents=True, exist_ok=True)
    path = args.json or Path(f"benchmarks/results/fp8-{hardware()}.json")
    os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
    names = {name: arm for arm, name in ARMS.items()}
    rows: list[dict[str, Any]] = []
    for model in args.models:
        measured = ranks.measure(
            exporter(model),
            [ARMS[arm] for arm in args.arms],
            model=model,
            config=write_config(folder / model, model),
            ranks=args.gpus,
            tp=args.tp,
            runs=args.runs,
            device="cuda",
            folder=folder,
            engine_arguments=(
                *("--quantization", "fp8", "--json-model-override-args", model_override()),
            ),
        )
        before = weights_bytes(model, torch.bfloat16.itemsize)
        rows += [row | {"arm": names[row["arm"]], "bytes_before": before} for row in measured]
        write_results(path, "fp8", rows)
    print_table(rows, ("sync",))
    missing = {(model, arm) for model in args.models for arm in args.arms} - {
        (row["model"], row["arm"]) for row in rows
    }
    if missing:
        parser.exit(1, f"not measured: {sorted(missing)}\n")


if __name__ == "__main__":
    main()
