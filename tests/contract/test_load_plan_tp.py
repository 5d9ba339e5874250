"""Load plans on two ranks: tensor parallel, and expert parallel, each rank with its own plan.

Two gloo processes build the same tiny SGLang classes sharded, and each proves its own plans. Both
together check syncs: each rank reads a part of a tensor, and only all of them know of a fault.
"""

from functools import partial

import pytest
import torch

from contract.load_plan_proof import LAYOUTS, prove
from contract.tiny_architecture_cases import case_named
from contract.tiny_architectures import (
    Ranks,
    build_model,
    finish_loading,
    prepare_process,
    random_weights,
    read_checkpoint,
    save_checkpoint,
)
from contract.weight_check_proof import check_on_ranks
from sglang_loader.common.regions.intervals import num_bytes
from sglang_loader.load_plan.rounds import num_bytes_read
from sglang_loader.load_plan.tracer import trace_bucket
from sglang_loader.load_plan.uses import uses_of
from support.plan_check import packed
from support.remote import Remote, finish, results_of
from support.served import environment

prepare_process()

DENSE = ("llama", "qwen2-tied", "qwen3", "gemma2", "gemma3-text", "phi3", "glm4", "granite")
MOE = ("qwen2-moe", "qwen3-moe", "mixtral", "glm4-moe", "deepseek-v2-lite", "deepseek-v3")
VISION = ("qwen2_5-vl", "qwen3-vl", "qwen3-vl-moe")
SOME = ("qwen2-tied", "gemma3-text", "phi3", "qwen3-moe", "deepseek-v3", "qwen2_5-vl")
NUM_RANKS = 2
TIMEOUT_S = 300


@pytest.mark.parametrize(
    ("ep_size", "names"),
    [
        pytest.param(1, SOME, id="tp2"),
        pytest.param(1, DENSE + MOE + VISION, id="tp2-all", marks=pytest.mark.slow),
        pytest.param(2, MOE, id="tp2-ep2", marks=pytest.mark.slow),
    ],
)
def test_each_rank_replays_byte_identically(ep_size, names, tmp_path):
    for name in names:
        save_checkpoint(case_named(name), tmp_path / name)
    results = run_ranks(tmp_path, prove_all, names, ep_size=ep_size)
    for name in names:
        parts = [result[name] for result in results]
        whole = (tmp_path / name / "model.safetensors").stat().st_size
        assert all(part["covered_bytes"] < 0.9 * whole for part in parts), "nothing is sharded"
        assert all(part["bytes_read"] < 0.9 * whole for part in parts), "all of it is read"
        for checked in (part["checked"] for part in parts):
            assert checked == parts[0]["checked"], "the ranks disagree"
            assert (checked["complete"], checked["blind"]) == ("", ""), (name, checked)
            assert checked["unnamed"] == [], name
        if ep_size > 1:
            assert all(part["ignored"] > 0 for part in parts), "every rank loads every expert"


def run_ranks(folder, function, *args, ep_size=1):
    """What `function(ranks, folder, *args)` returns on each rank."""
    running = [
        Remote(
            partial(Ranks, folder / "rendezvous", rank, NUM_RANKS, ep_size),
            environment=environment("cpu", NUM_RANKS),
            log=folder / f"rank-{rank}.log",
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        results_of(finish(running, TIMEOUT_S))
        for process in running:
            process.begin(function, folder, *args)
        return results_of(finish(running, TIMEOUT_S))
    finally:
        for process in running:
            process.kill()
            process.end()


def prove_all(ranks, folder, names):
    """On one rank: the plan's numbers by name; any difference raises."""
    prepare_process()
    return {name: proved(ranks, folder, name) for name in names}


def proved(ranks, folder, name):
    case = case_named(name)
    like = read_checkpoint(case, folder / name)
    model = build_model(case, folder / name, ranks)
    first, second = random_weights(like, 1), random_weights(like, 2)
    model.load_weights(iter(first))
    finish_loading(model)
    checked = check_on_ranks(model, first, every_rank)
    plans = [prove(model, first, second, how) for how in LAYOUTS]
    return {
        "checked": checked,
        "ignored": len(uses_of(trace_bucket(model, model.load_weights, *packed(first))).unused),
        "bytes_read": sum(
            num_bytes_read(copy) for bucket in plans[0].buckets for copy in bucket.copies
        ),
        "covered_bytes": sum(num_bytes(ranges) for ranges in plans[0].coverage.values()),
    }


def every_rank(item):
    items = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(items, item)
    return items
