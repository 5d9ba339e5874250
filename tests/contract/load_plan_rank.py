"""One rank of a tensor- or expert-parallel SGLang on the CPU: proves load plans for saved
checkpoints, and checks syncs together with the other ranks.
"""

import json

import torch

from contract.load_plan_proof import LAYOUTS, pack, prove
from contract.tiny_architecture_cases import case_named
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


def every_rank(item):
    items = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(items, item)
    return items


def main(folder, rank, tp_size, ep_size, names):
    """One rank's process.

    `folder` holds one checkpoint folder for each name. Writes `folder/result-RANK.json`: for each
    name either the plan's numbers, or why the class could not be built. Any difference raises.
    """
    prepare_process()
    ranks = Ranks(folder / "rendezvous", rank, tp_size, ep_size)
    results = {}
    for name in names:
        case = case_named(name)
        like = read_checkpoint(case, folder / name)
        try:
            model = build_model(case, folder / name, ranks)
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
            "ignored": len(uses_of(trace_bucket(model, model.load_weights, *pack(first))).idle),
            "arranged_bytes": sum(num_bytes_read(bucket) for bucket in plans[0].buckets),
            "covered_bytes": sum(num_bytes(ranges) for ranges in plans[0].coverage.values()),
        }
    (folder / f"result-{rank}.json").write_text(json.dumps(results))
