"""Does anything grow from sync to sync? GPU memory, file descriptors, shared memory, host RSS.

    python benchmarks/growth.py --models qwen3-8b --syncs 200 --json FILE
    python benchmarks/growth.py --models tiny --syncs 30 --device cpu

One trainer process, one real SGLang server, `+weight_sync=compiled`, every sync with its release
and resume. What both processes hold is read after every tenth of the syncs: after the first, plans
are made and buffers mapped; what grows for ever grows as much in the last half as before.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(path) for path in (ROOT, ROOT / "plugins")]

import psutil  # noqa: E402
import torch  # noqa: E402

from verl_sglang_sync.commands.bench.arms import ARMS, manager_of  # noqa: E402
from verl_sglang_sync.commands.bench.colocated import prepare  # noqa: E402
from verl_sglang_sync.commands.bench.engine_server import engine_server  # noqa: E402
from verl_sglang_sync.commands.bench.model_shapes import MODELS, write_config  # noqa: E402
from verl_sglang_sync.commands.bench.results_file import hardware, write_results  # noqa: E402
from verl_sglang_sync.commands.bench.trainers import ShardedModel, dtype_on, size_of  # noqa: E402

SHARED_MEMORY = Path("/dev/shm")


def held(device: torch.device) -> dict[str, int]:
    """What this process and the server's hold now."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    gpu = 0
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        gpu = total - free
    return {
        "gpu_bytes": gpu,
        "num_fds": sum(process.num_fds() for process in family),
        "rss_bytes": sum(process.memory_info().rss for process in family),
        "rss_trainer_bytes": family[0].memory_info().rss,
        "num_shared_files": sum(1 for _ in SHARED_MEMORY.iterdir()),
        "num_threads": sum(process.num_threads() for process in family),
        "num_mappings": sum(len(process.memory_maps(grouped=False)) for process in family),
    }


def run(model: str, arm: str, syncs: int, device: torch.device, folder: Path) -> dict[str, Any]:
    """All syncs of one arm; returns a row."""
    config = write_config(folder / model, model)
    is_moe = "num_experts" in MODELS[model]
    log = folder / f"server-{model}-{arm}.log"
    weights = ShardedModel(model, device, ARMS[arm].dtype).reexport()

    async def cycle(manager: Any) -> None:
        await manager.release()
        await manager.resume(("weights",))
        await manager.sync(weights, version="0")
        await manager.resume(("kv_cache",))

    samples: list[dict[str, int]] = []
    tenth = max(syncs // 10, 5)
    with engine_server(
        config, device=device.type, host_backup="auto", is_moe=is_moe, log=log
    ) as url:
        manager = manager_of(ARMS[arm], url, config, device)
        for i in range(syncs):
            asyncio.run(cycle(manager))
            if (i + 1) % tenth == 0 or i + 1 == syncs:
                samples.append({"num_syncs": i + 1, **held(device)})
    early, middle, late = samples[0], samples[(len(samples) - 1) // 2], samples[-1]
    return {
        "arm": arm,
        "model": model,
        **size_of(model, ARMS[arm].dtype or dtype_on(device)),
        "gpus": 1 if device.type == "cuda" else 0,
        "tp": 1,
        "runs": syncs,
        "median_s": {},
        "samples": samples,
        "growth": {key: late[key] - early[key] for key in late},
        "growth_in_last_half": {key: late[key] - middle[key] for key in late},
    }


def main() -> None:
    """Run all arms of all models; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["qwen3-8b"])
    parser.add_argument("--arms", nargs="+", default=["compiled", "compiled_packed"])
    parser.add_argument("--syncs", type=int, default=200)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, help="server logs; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    folder = args.folder or Path(tempfile.mkdtemp(prefix="growth-"))
    folder.mkdir(parents=True, exist_ok=True)
    prepare(device)
    rows = []
    for model in args.models:
        for arm in args.arms:
            rows.append(run(model, arm, args.syncs, device, folder))
            for key in ("growth", "growth_in_last_half"):
                print(model, arm, key, rows[-1][key], flush=True)
            if args.json is not None or device.type == "cuda":
                path = args.json or Path(f"benchmarks/results/growth-{hardware()}.json")
                write_results(path, "growth", rows)


if __name__ == "__main__":
    main()
