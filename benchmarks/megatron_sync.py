"""Seconds of a weight sync from a Megatron trainer, with the share of its export apart.

    python benchmarks/megatron_sync.py --device cpu --json FILE
    python benchmarks/megatron_sync.py --model qwen3-30b-a3b --ep 2 --runs 5     # two GPUs
    python benchmarks/megatron_sync.py --tp 2 --ep 2 --ranks 4 --engine-tp 2     # four, two engines

The trainer is verl's `MegatronEngine` with megatron-core and Megatron-Bridge, verl's default, or
`--mbridge` (of Transformer Engine's layers only the parameters), one process per rank and GPU; its
ranks are those of one real SGLang engine, or of several. Weights are random. The arms: `ranks`.
"""

from __future__ import annotations

import argparse
import math
import os
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(path) for path in (ROOT, ROOT / "tests", ROOT / "plugins")]
sys.path[:0] = PATHS

import msgspec  # noqa: E402
import torch  # noqa: E402

from benchmarks import ranks  # noqa: E402
from support.megatron_trainer import ENVIRONMENT, Layout, MegatronActor  # noqa: E402
from verl_sglang_sync.commands.bench.model_shapes import MODELS, tensor_shapes, write_config  # noqa: E402
from verl_sglang_sync.commands.bench.results_file import hardware, print_table, write_results  # noqa: E402

ARMS = (ranks.NATIVE, ranks.EXPORT_ONLY, *ranks.OURS)
DEFAULT_ARMS = (ranks.EXPORT_ONLY, "per_tensor", "flattened", "compiled")
STAGES = ("confirm", "export", "gather", "pack", "load")


def make_checkpoint(folder: Path, model: str) -> Path:
    """A checkpoint of the model's names and shapes. Its data is a hole in the file: the bridge
    reads the header alone, and the trainer's weights are made on its GPU.
    """
    write_config(folder, model)
    header, end = {}, 0
    for name, shape in tensor_shapes(MODELS[model]):
        begin, end = end, end + math.prod(shape) * torch.bfloat16.itemsize
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (begin, end)}
    text = msgspec.json.encode(header)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + end)
    return folder


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Start the engines and the trainer; a row for each arm."""
    checkpoint = make_checkpoint(folder / args.model, args.model)
    layout = Layout(
        tp=args.tp,
        pp=args.pp,
        ep=args.ep,
        mbridge=args.mbridge,
        offload=args.offload,
        ddp=not args.no_gradients,
    )
    rows = ranks.measure(
        lambda _: MegatronActor(checkpoint, layout, random=True).export,
        args.arms,
        model=args.model,
        config=checkpoint,
        ranks=args.ranks,
        tp=args.engine_tp,
        runs=args.runs,
        device=args.device,
        folder=folder,
        bucket_bytes=args.bucket_mb << 20,
        environment=ENVIRONMENT if args.device == "cpu" else None,
        gpus_per_host=args.gpus_per_host,
    )
    return [row | {"trainer": msgspec.structs.asdict(layout)} for row in rows]


def main() -> None:
    """Run all arms; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="small-moe")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=DEFAULT_ARMS)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tp", type=int, default=1, help="of the trainer; likewise pp and ep")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--ranks", type=int, help="of the trainer; default: as few as it can be")
    parser.add_argument(
        "--gpus-per-host", type=int, default=1, help=f"of {ranks.APART}; default: %(default)s"
    )
    parser.add_argument("--engine-tp", type=int, help="default: all ranks are one engine's")
    parser.add_argument("--mbridge", action="store_true")
    parser.add_argument("--offload", action="store_true", help="verl's param_offload")
    parser.add_argument(
        "--no-gradients", action="store_true", help="no DDP buffers: 30 B on GPUs of 80 GB"
    )
    parser.add_argument("--bucket-mb", type=int, default=2048, help="verl's default is 2048")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, help="logs; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    fewest = max(args.tp, args.ep) * args.pp
    args.ranks = args.ranks or fewest
    args.engine_tp = args.engine_tp or args.ranks
    for what, divisor in (("tp, ep and pp", fewest), ("--engine-tp", args.engine_tp)):
        if args.ranks % divisor:
            parser.error(f"--ranks {args.ranks}: not a multiple of {divisor} ({what})")
    os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
    folder = args.folder or Path(tempfile.mkdtemp(prefix="megatron-"))
    folder.mkdir(parents=True, exist_ok=True)
    rows = measure(args, folder)
    write_results(
        args.json or Path(f"benchmarks/results/megatron_sync-{hardware()}.json"),
        "megatron_sync",
        rows,
    )
    print_table(rows, ("sync", *(f"sync_{stage}" for stage in STAGES)))
    if len(rows) < len(args.arms):
        parser.exit(1, f"not measured: {args.arms[len(rows) :]}\n")


if __name__ == "__main__":
    main()
