"""Load plans on two ranks: tensor parallel, and expert parallel, each rank with its own plan.

Two gloo processes build the same tiny SGLang classes sharded, and each proves its own plans. Both
together check syncs: each rank reads a part of a tensor, and only all of them know of a fault.
"""

import json
import os

import pytest

from contract.load_plan_rank import main
from contract.tiny_architecture_cases import case_named
from contract.tiny_architectures import prepare_process, save_checkpoint
from support.forks import Fork
from support.sglang_server import environment

prepare_process()
pytest.importorskip("sglang", reason="needs the SGLang that the plugin supports")

DENSE = ("llama", "qwen2-tied", "qwen3", "gemma2", "gemma3-text", "phi3", "glm4", "granite")
MOE = ("qwen2-moe", "qwen3-moe", "mixtral", "glm4-moe", "deepseek-v2-lite", "deepseek-v3")
VISION = ("qwen2_5-vl", "qwen3-vl", "qwen3-vl-moe")
NUM_RANKS = 2
TIMEOUT_S = 300


@pytest.mark.parametrize(
    ("ep_size", "names"),
    [
        pytest.param(1, DENSE + MOE + VISION, id="tp2"),
        pytest.param(2, MOE, id="tp2-ep2", marks=pytest.mark.slow),
    ],
)
def test_each_rank_replays_byte_identically(ep_size, names, tmp_path):
    for name in names:
        save_checkpoint(case_named(name), tmp_path / name)
    results = run_ranks(tmp_path, ep_size, names)
    for name in names:
        parts = [result[name] for result in results]
        assert all("not_built" not in part for part in parts), (name, parts)
        whole = (tmp_path / name / "model.safetensors").stat().st_size
        assert all(part["covered_bytes"] < 0.9 * whole for part in parts), "nothing is sharded"
        assert all(part["arranged_bytes"] < 0.9 * whole for part in parts), "all of it is read"
        for checked in (part["checked"] for part in parts):
            assert checked == parts[0]["checked"], "the ranks disagree"
            assert (checked["complete"], checked["blind"]) == ("", ""), (name, checked)
            assert checked["unnamed"] == [], name
        if ep_size > 1:
            assert all(part["ignored"] > 0 for part in parts), "every rank loads every expert"


def run_ranks(folder, ep_size, names):
    """Both ranks' results; fails with the output of the rank that failed."""
    variables = {**os.environ, **environment("cpu", NUM_RANKS)}
    logs = [folder / f"rank-{rank}.log" for rank in range(NUM_RANKS)]
    running = [
        Fork(main, folder, rank, NUM_RANKS, ep_size, names, environment=variables, log=log)
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=TIMEOUT_S) for process in running]
    finally:
        for process in running:
            process.kill()
    for code, log in zip(codes, logs, strict=True):
        assert code == 0, log.read_text()[-4000:]
    return [json.loads((folder / f"result-{r}.json").read_text()) for r in range(NUM_RANKS)]
