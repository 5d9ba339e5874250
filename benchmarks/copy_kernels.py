"""Ways of making a load plan's copies on the GPU: fused by torch, one by one, or by our kernel.

    python benchmarks/copy_kernels.py --json FILE

Cases: dense copies of the sizes of an 8 B model; a 30 B mixture of experts into fused tensors, as
a plan coalesces it at TP 1; and the same at TP 4, where `down_proj` is cut along its rows. Arms:
`foreach` is `torch._foreach_copy_`, `each` one `copy_` per copy, `triton` is
`sglang_loader.common.copy_kernel`. All views are of 64-bit words.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from sglang_loader.common.copy_kernel import BatchedCopy  # noqa: E402
from verl_sglang_sync.bench.model_shapes import MODELS, tensor_shapes  # noqa: E402
from verl_sglang_sync.bench.results_file import hardware, write_results  # noqa: E402

LAYERS = 12  # of the mixture of experts: a quarter of its bytes
Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]


def dense(device: torch.device) -> Pairs:
    """Every tensor of the 8 B model, each a copy of its own."""
    words = [torch.Size(shape).numel() // 4 for _, shape in tensor_shapes(MODELS["qwen3-8b"])]
    source = torch.empty(sum(words), dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    return list(target.split(words)), list(source.split(words))


def experts(device: torch.device, tp: int) -> Pairs:
    """128 experts of hidden size 2048 and intermediate size 768, fused by layer."""
    num, hidden, inter = 128, 2048 // 4, 768
    part = inter // tp
    targets, sources = [], []
    for _ in range(LAYERS):
        w13 = torch.empty(num, 2 * part, hidden, dtype=torch.int64, device=device)
        w2 = torch.empty(num, hidden * 4, part // 4, dtype=torch.int64, device=device)
        sent = torch.empty(num, 3, inter * hidden, dtype=torch.int64, device=device)
        for which in (0, 1):
            rows = sent[:, which].view(num, inter * hidden)[:, : part * hidden]
            sources.append(rows)
            targets.append(w13[:, which * part : (which + 1) * part].reshape_as(rows))
        columns = sent[:, 2].view(num, hidden * 4, inter // 4)[:, :, : part // 4]
        dense_down = tp == 1
        sources.append(columns.reshape(num, -1) if dense_down else columns)
        targets.append(w2.view(num, -1) if dense_down else w2)
    return targets, sources


def foreach(pairs: Pairs) -> Callable[[], object]:
    return lambda: torch._foreach_copy_(*pairs)


def each(pairs: Pairs) -> Callable[[], object]:
    def run() -> None:
        for target, source in zip(*pairs, strict=True):
            target.copy_(source)

    return run


def triton(pairs: Pairs) -> Callable[[], object]:
    return BatchedCopy.of(*pairs).run


ARMS = {"foreach": foreach, "each": each, "triton": triton}


def measure(run: Callable[[], object], runs: int) -> list[float]:
    """Seconds of each run, by events around it."""
    seconds = []
    for i in range(3 + runs):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        if i >= 3:
            seconds.append(start.elapsed_time(stop) / 1e3)
    return seconds


def main() -> None:
    """Run all arms on all cases; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    cases: dict[str, Callable[[], Pairs]] = {
        "qwen3-8b, dense": lambda: dense(device),
        "qwen3-30b-a3b experts, TP 1": lambda: experts(device, 1),
        "qwen3-30b-a3b experts, TP 4": lambda: experts(device, 4),
    }
    rows: list[dict[str, Any]] = []
    for name, make in cases.items():
        targets, sources = make()
        nbytes = sum(source.nbytes for source in sources)
        for source in sources:
            source.random_()
        for arm, prepare in ARMS.items():
            for target in targets:
                target.zero_()
            run = prepare((targets, sources))
            seconds = measure(run, args.runs)
            right = all(torch.equal(t, s) for t, s in zip(targets, sources, strict=True))
            median = statistics.median(seconds)
            rows.append(
                {
                    "arm": arm,
                    "model": name,
                    "num_tensors": len(targets),
                    "bytes": nbytes,
                    "gpus": 1,
                    "tp": 1,
                    "runs": args.runs,
                    "median_s": {"copy": median},
                    "runs_s": seconds,
                    "bytes_per_s": nbytes / median,
                    "right": right,
                }
            )
            rate = nbytes / median / 1e12
            print(f"{name:30} {arm:8} {median * 1e3:8.3f} ms {rate:.2f} TB/s {right}")
        del targets, sources, run
        torch.cuda.empty_cache()
    write_results(
        args.json or Path(f"benchmarks/results/copy_kernels-{hardware()}.json"),
        "copy_kernels",
        rows,
    )


if __name__ == "__main__":
    main()
