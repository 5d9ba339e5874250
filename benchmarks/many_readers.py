"""All engine ranks of a node read the experts of all trainer ranks: does the order of tiles matter?

    PYTHONPATH=plugins python benchmarks/many_readers.py --json FILE     # two GPUs or more

A process for each GPU, which hides the others. Some own the experts of a few layers in blocks, as
FSDP2 shards fused experts; the readers map them and copy their part by the project's kernel, a
bucket for each layer. `in order` takes the copies in the order of the experts, so that all readers
want the same GPU's memory at a time; `mixed` is the project's order
(`copies.kernel.interleaved_order`). The slowest reader counts. After the last read the bytes are
compared with the owners'.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins"), str(ROOT / "tests")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from sglang_loader.common.copies.kernel import WORD  # noqa: E402
from sglang_loader.common.shared_memory import map_buffer, share_storage  # noqa: E402
from support.kernel_copies import launcher  # noqa: E402
from verl_sglang_sync.commands.bench.results_file import write_results  # noqa: E402

EXPERTS, INTERMEDIATE, HIDDEN = 128, 768, 2048  # of Qwen3-30B-A3B
NUM_LAYERS, NUM_RUNS, NUM_WARM_UPS = 10, 5, 2
TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Case:
    """Who holds experts, and who reads them: GPUs by number, and the readers' `tp`."""

    owners: int
    first_reader: int
    readers: int
    tp: int


def cases(num_gpus: int) -> list[Case]:
    """Colocated, and on GPUs of their own, for as many GPUs as there are."""
    half = num_gpus // 2
    tps = [tp for tp in (4, 2, 1) if num_gpus % tp == 0]
    together = [Case(num_gpus, 0, num_gpus, tp) for tp in tps]
    return together + [Case(half, half, half, tp) for tp in tps if half % tp == 0]


Bucket = tuple[list[torch.Tensor], list[torch.Tensor], list[int]]
"""Targets, sources and, by source, which owner has it; views of `WORD`s."""


class Rank:
    """One process, of GPU `number`."""

    def __init__(self, number: int, num_gpus: int, store: Path) -> None:
        self._number = number
        self._num_gpus = num_gpus
        self._device = torch.device("cuda", 0)
        dist.init_process_group(
            "gloo", f"file://{store}", rank=number, world_size=num_gpus, timeout=TIMEOUT
        )

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self._num_gpus
        dist.all_gather_object(found, value)
        return found

    def run(self, case: Case) -> list[dict[str, Any]]:
        """Collective; a row for each arm, the same on all ranks."""
        per_owner = EXPERTS // case.owners
        own = self._make_layers(per_owner) if self._number < case.owners else []
        handles = [[share_storage(t.untyped_storage()) for t in own] for _ in range(self._num_gpus)]
        torch.cuda.synchronize()
        mapped = {}
        for owner, offered in enumerate(self.gather(handles)[: case.owners]):
            mapped[owner] = own
            if owner != self._number:
                mapped[owner] = [map_buffer(h, self._device) for h in offered[self._number]]
        reader = self._number - case.first_reader
        buckets = []
        if 0 <= reader < case.readers:
            buckets = [self._bucket(case, mapped, reader, layer) for layer in range(NUM_LAYERS)]
        in_order = [launcher(targets, sources) for targets, sources, _ in buckets]
        mixed = [launcher(*bucket) for bucket in buckets]
        return [
            self._measure(case, arm, buckets, launches)
            for arm, launches in (("in order", in_order), ("mixed", mixed))
        ]

    def _make_layers(self, num_experts: int) -> list[torch.Tensor]:
        nbytes = num_experts * 3 * INTERMEDIATE * HIDDEN * torch.bfloat16.itemsize
        shape = (nbytes // WORD.itemsize,)
        return [
            torch.randint(1 << 62, shape, dtype=WORD, device=self._device)
            for _ in range(NUM_LAYERS)
        ]

    def _bucket(
        self, case: Case, mapped: dict[int, list[torch.Tensor]], reader: int, layer: int
    ) -> Bucket:
        """Targets and sources of a layer's experts, and whose each is."""
        rows, row = INTERMEDIATE // case.tp, HIDDEN * torch.bfloat16.itemsize // WORD.itemsize
        columns = rows * torch.bfloat16.itemsize // WORD.itemsize
        all_columns, part = columns * case.tp, reader % case.tp
        up_down = torch.empty(EXPERTS, 3, rows * row, dtype=WORD, device=self._device)
        targets, sources, owners = [], [], []
        for expert in range(EXPERTS):
            owner, at = divmod(expert, EXPERTS // case.owners)
            whole = mapped[owner][layer].view(WORD).view(-1, 3, INTERMEDIATE * row)[at]
            for half in (0, 1):  # gate and up: rows of this reader
                targets.append(up_down[expert, half])
                sources.append(whole[half].view(case.tp, -1)[part])
            down = whole[2].view(HIDDEN, all_columns)  # down: columns of this reader
            targets.append(up_down[expert, 2].view(HIDDEN, columns))
            sources.append(down[:, part * columns :][:, :columns])
            owners += [owner] * 3
        return targets, sources, owners

    def _measure(
        self, case: Case, arm: str, buckets: list[Bucket], launches: list[Callable[[], None]]
    ) -> dict[str, Any]:
        seconds = []
        for _ in range(NUM_WARM_UPS + NUM_RUNS):
            torch.cuda.synchronize()
            dist.barrier()
            started = time.perf_counter()
            for run in launches:
                run()
            torch.cuda.synchronize()
            seconds.append(max(self.gather(time.perf_counter() - started)))
        for targets, sources, _ in buckets:
            assert all(map(torch.equal, targets, sources)), "other bytes arrived"
        nbytes = NUM_LAYERS * EXPERTS * 3 * INTERMEDIATE * HIDDEN * torch.bfloat16.itemsize
        timed = seconds[NUM_WARM_UPS:]
        far = 1 - (1 / case.owners if case.first_reader == 0 else 0)
        median = statistics.median(timed)
        return {
            "arm": arm,
            **asdict(case),
            "gpus": self._num_gpus,
            "bytes": nbytes // case.tp,
            "runs_s": timed,
            "median_s": {"read": median},
            "peer_gb_s": far * nbytes / case.tp / median / 1e9,
        }


def main() -> None:
    """Start a process for each GPU; the first one writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rank", type=int, nargs=2, metavar=("NUMBER", "GPUS"))
    parser.add_argument("--store", type=Path)
    args = parser.parse_args()
    if args.rank is None:
        store = Path(tempfile.mkdtemp(prefix="many-readers-")) / "store"
        num_gpus = torch.cuda.device_count()
        ranks = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__, "--json", str(args.json), "--store", str(store)),
                    *("--rank", str(number), str(num_gpus)),
                ],
                env=os.environ | {"CUDA_VISIBLE_DEVICES": str(number)},
            )
            for number in range(num_gpus)
        ]
        sys.exit(max(rank.wait() for rank in ranks))
    number, num_gpus = args.rank
    rank = Rank(number, num_gpus, args.store)
    rows = []
    for case in cases(num_gpus):
        rows += rank.run(case)
        torch.cuda.empty_cache()
    if number == 0:
        for row in rows:
            print({key: value for key, value in row.items() if key != "runs_s"})
        write_results(args.json, "many_readers", rows)
    dist.barrier()  # what one owns others have mapped


if __name__ == "__main__":
    main()
