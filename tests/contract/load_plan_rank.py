"""One rank of a tensor- or expert-parallel SGLang on the CPU: proves load plans for saved
checkpoints, and checks syncs together with the other ranks.

    python -m contract.load_plan_rank FOLDER RANK TP_SIZE EP_SIZE NAME...

FOLDER holds one checkpoint folder for each NAME. Writes `FOLDER/result-RANK.json`: for each name
either the plan's numbers, or why the class could not be built. Any difference ends the process with
a traceback.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from contract.load_plan_proof import LAYOUTS, pack, prove
from contract.tiny_architecture_cases import CASES
from contract.tiny_architectures import (
    CannotBuild,
    Ranks,
    build_model,
    finish_loading,
    prepare_process,
    random_weights,
    read_checkpoint,
)
from contract.weight_check_proof import check_on_ranks
from sglang_loader.common.regions.intervals import num_bytes
from sglang_loader.load_plan import trace_bucket, uses_of
from sglang_loader.load_plan.arrange import num_bytes_read
from support.plan_check import uncovered


def every_rank(item: Any) -> list[Any]:
    """Everybody's item, by rank."""
    items: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(items, item)
    return items


def main(folder: Path, rank: int, tp_size: int, ep_size: int, names: list[str]) -> None:
    prepare_process()
    ranks = Ranks(folder / "rendezvous", rank, tp_size, ep_size)
    cases = {case.name: case for case in CASES}
    results: dict[str, dict[str, object]] = {}
    for name in names:
        like = read_checkpoint(cases[name], folder / name)
        try:
            model = build_model(cases[name], folder / name, ranks)
        except CannotBuild as reason:
            results[name] = {"not_built": str(reason)}
            continue
        first, second = random_weights(like, 1), random_weights(like, 2)
        model.load_weights(iter(first))
        finish_loading(model)
        checked = check_on_ranks(model, first, every_rank)
        plans = [prove(model, first, second, how) for how in LAYOUTS]
        results[name] = {
            "checked": checked,
            "num_copies": plans[0].num_copies,
            "ignored": len(uses_of(trace_bucket(model, model.load_weights, *pack(first))).idle),
            "uncovered_parameters": uncovered(plans[0], "parameter"),
            "arranged_bytes": sum(num_bytes_read(bucket) for bucket in plans[0].buckets),
            "covered_bytes": sum(num_bytes(ranges) for ranges in plans[0].coverage.values()),
        }
    (folder / f"result-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(arg) for arg in sys.argv[2:5]), names=sys.argv[5:])
