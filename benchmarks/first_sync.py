"""Seconds of Python in the engine's part of a first sync: tracing, plan, proof, manifest check.

    python benchmarks/first_sync.py --json FILE
    python benchmarks/first_sync.py --arms before=/other/checkout/plugins after=plugins --tp 1 2

The model is SGLang's own class in the structure of a public one (layers, experts, tensors, the
buckets of 2048 MB that a trainer would send), with a hidden size of 32, on a CPU: what is left is
the work per tensor. What goes by bytes, on a GPU the copies and digests, cannot be seen here.

Every arm is a process per TP rank with the packages of one checkout; the arms take turns, one first
sync each, and the first round is a warm-up. At TP above 1 only rank 0 is measured, alone. Seconds
are those of the processor, in one thread: others who work on the machine do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30
BUCKET_BYTES = 2 * GIB
SMALL = {
    "hidden_size": 32,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "vocab_size": 128,
}
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_NCCL_SO_PATH": "/nonexistent"}
PHASES = ("trace", "uses", "compile", "infer", "prove", "finish", "check", "sync")
PREPARE = "load_weights"
"""Beside the phases: one plain `load_weights` of all buckets, for comparison."""


class Arm:
    """The processes of one checkout, of which rank 0 makes a first sync when told to."""

    def __init__(self, plugins: Path, model: str, tp: int, folder: Path) -> None:
        folder.mkdir(parents=True)
        path = os.pathsep.join([str(plugins.resolve()), str(ROOT / "tests"), str(ROOT)])
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), str(tp), model, str(folder)],
                env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(tp)
        ]

    def sync(self) -> dict[str, float]:
        """Seconds of one first sync, by phase."""
        leader = self._ranks[0]
        assert leader.stdin is not None and leader.stdout is not None
        leader.stdin.write("sync\n")
        leader.stdin.flush()
        for line in leader.stdout:
            if line.startswith("{"):
                found: dict[str, float] = json.loads(line)
                return found
        raise RuntimeError(f"rank 0 ended: {leader.wait()}")

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            rank.wait()


def serve(rank: int, tp: int, model: str, folder: Path) -> None:
    """One rank: builds the model, then makes a first sync for each line that comes."""
    import torch

    from contract.tiny_architectures import Case, Ranks, build_model, prepare_process
    from verl_sglang_sync.commands.bench.model_shapes import MODELS, tensor_shapes

    prepare_process()
    torch.set_num_threads(1)
    config = MODELS[model] | SMALL
    checkpoint = folder / f"rank-{rank}"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(config))
    built = build_model(Case(model, "", ""), checkpoint, Ranks(folder / "rendezvous", rank, tp))
    sizes = list(tensor_shapes(MODELS[model]))
    buckets = make_buckets(list(tensor_shapes(config)), [shape for _, shape in sizes])
    for line in sys.stdin:
        if line.strip():
            print(json.dumps(first_sync(built, buckets, is_alone=tp == 1)), flush=True)


def make_buckets(
    named: list[tuple[str, tuple[int, ...]]], full_shapes: list[tuple[int, ...]]
) -> list[Any]:
    """(layout, filled buffer) of each bucket, cut where the full model's tensors fill one."""
    import math

    import torch

    from sglang_loader.common.layout import BucketLayout

    cuts: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = [[]]
    filled = 0
    for (name, shape), full in zip(named, full_shapes, strict=True):
        nbytes = 2 * math.prod(full)
        if cuts[-1] and filled + nbytes > BUCKET_BYTES:
            cuts.append([])
            filled = 0
        filled += nbytes
        cuts[-1].append((name, shape, torch.bfloat16))
    buckets = []
    for cut in cuts:
        layout = BucketLayout.pack(cut)
        buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
        for _, view in layout.views(buffer):
            view.normal_()
        buckets.append((layout, buffer))
    return buckets


def first_sync(model: Any, buckets: list[Any], *, is_alone: bool = True) -> dict[str, float]:
    """Seconds by phase of a sync that records and proves a plan, with a loader that knows none.

    Args:
        is_alone: there is no other rank: the manifest check must be content with this one.
    """
    from sglang_loader.common.bucket_source import BucketSource
    from sglang_loader.common.garbage_collection import no_full_collections
    from sglang_loader.session import model_loader, recording, weight_check
    from sglang_loader.upstream import engine_context

    times: defaultdict[str, float] = defaultdict(float)
    started = time.process_time()
    for layout, buffer in buckets:
        model.load_weights(iter(layout.views(buffer)))
    times[PREPARE] = time.process_time() - started
    vars(model).pop(model_loader._ATTRIBUTE, None)
    loader = model_loader.loader_of(model)
    with (
        no_full_collections(),  # as the engine's hook has it
        timed(times, "trace", recording, "trace_bucket"),
        timed(times, "uses", recording, "uses_of"),
        timed(times, "compile", recording, "compile_bucket"),
        timed(times, "infer", getattr(recording, "LayerTemplates", recording), "infer"),
        timed(times, "prove", recording, "check_bucket"),
        timed(times, "finish", model_loader.ModelLoader, "finish"),
    ):
        started = time.process_time()
        loader.start(engine_context(model))
        for index, (layout, buffer) in enumerate(buckets):
            loader.load(index, layout, BucketSource.flat(buffer))
        outcome = loader.finish()
        checked = time.process_time()
        layouts = [layout for layout, _ in buckets]
        seen = weight_check.view_of_sync(layouts, [model], lambda: None)
        verdict = weight_check.judge_together(seen, lambda item: [item])
        ended = time.process_time()
    fits = verdict.not_checked is None and (verdict.fits or not is_alone)
    if outcome.reason != "the plan is being made" or not fits:
        raise RuntimeError(f"no plan was made: {outcome.reason}; {verdict.remark()}")
    return times | {"check": ended - checked, "sync": ended - started}


@contextmanager
def timed(times: dict[str, float], phase: str, owner: Any, name: str) -> Iterator[None]:
    """Count the seconds of a function under `phase` for as long as the body runs."""
    original: Callable[..., Any] | None = getattr(owner, name, None)
    if original is None:  # an older checkout has no such phase
        yield
        return

    def run(*args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        try:
            return original(*args, **kwargs)
        finally:
            times[phase] += time.process_time() - started

    setattr(owner, name, run)
    try:
        yield
    finally:
        setattr(owner, name, original)


def measure(args: argparse.Namespace, tp: int, folder: Path) -> list[dict[str, Any]]:
    """A row for each arm at one TP size; the arms take turns."""
    from verl_sglang_sync.commands.bench.model_shapes import MODELS, tensor_shapes
    from verl_sglang_sync.commands.bench.results_file import medians

    arms = {
        name: Arm(Path(plugins), args.model, tp, folder / f"{name}-{tp}")
        for name, plugins in (arm.split("=", 1) for arm in args.arms)
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    try:
        for _ in range(1 + args.runs):
            for name, arm in arms.items():
                runs[name].append(arm.sync())
                print(f"tp {tp} {name}: {runs[name][-1]['sync']:.2f} s", flush=True)
    finally:
        for arm in arms.values():
            arm.close()
    return [
        {
            "arm": name,
            "model": f"{args.model}, hidden size {SMALL['hidden_size']}",
            "num_tensors": len(list(tensor_shapes(MODELS[args.model]))),
            "gpus": 0,
            "tp": tp,
            "runs": args.runs,
            "median_s": medians(measured[1:]),
            "runs_s": measured[1:],
        }
        for name, measured in runs.items()
    ]


def main() -> None:
    """Run all arms; see the module docstring."""
    if sys.argv[1:2] == ["--rank"]:
        rank, tp, model, folder = sys.argv[2:6]
        serve(int(rank), int(tp), model, Path(folder))
        return
    sys.path.insert(0, str(ROOT))
    from verl_sglang_sync.commands.bench.results_file import hardware, print_table, write_results

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--arms", nargs="+", default=[f"after={ROOT / 'plugins'}"])
    parser.add_argument("--tp", type=int, nargs="+", default=[1])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-sync-") as folder:
        path = args.json or Path(f"benchmarks/results/first_sync-{hardware()}.json")
        rows: list[dict[str, Any]] = []
        for tp in args.tp:
            rows += measure(args, tp, Path(folder))
            write_results(path, "first_sync", rows)
    print_table(rows, (PREPARE, *PHASES))


if __name__ == "__main__":
    main()
