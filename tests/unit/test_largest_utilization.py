"""The search of `benchmarks/largest_utilization.py`, and how it tells what a failed run died of."""

import argparse
import subprocess
import time

import pytest
from benchmarks import grpo_step, largest_utilization
from benchmarks.largest_utilization import Search, TimeIsUp, largest, why_failed

LOWEST, HIGHEST = 15, 49


@pytest.mark.parametrize("start", [LOWEST, 30, 40, HIGHEST])
def test_the_largest_number_is_found_in_few_runs(start):
    for limit in range(LOWEST - 1, HIGHEST + 1):
        asked = []
        found = largest(lambda n: asked.append(n) or n <= limit, start, LOWEST, HIGHEST)  # noqa: B023
        assert found == (limit if limit >= LOWEST else None)
        assert len(set(asked)) == len(asked) <= 10
        assert abs(start - limit) > 1 or len(asked) <= 4


@pytest.mark.parametrize(
    ("log", "ended"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "out of memory"),
        (
            "RuntimeError: resume of ['kv_cache'] refused: it needs 9 MB of GPU memory, "
            "3 MB more than are free",
            "out of memory",
        ),
        ("CUresult error: 2 (out of memory)  file=csrc/utils.h", "out of memory"),
        ("ValueError: Loaded weights leave no GPU memory for the KV cache", "out of memory"),
        ("Task was killed due to the node running low on memory. OutOfMemoryError", "error"),
        ("KeyError: 'weights'\n(see the log)", "error"),
    ],
)
def test_what_a_run_died_of(log, ended):
    assert why_failed(f"starting\n{log}\n")[0] == ended


@pytest.fixture
def search(tmp_path, monkeypatch):
    """A search whose runs fit up to 0.81; each takes what of the limit `run.seconds` says."""

    def run_arm(arm, folder, steps, more, limit_s):
        share = float(next(o for o in more if "utilization" in o).split("=")[1])
        log = folder / f"run-{arm}.log"
        log.write_text("CUDA out of memory" if share > 0.81 else "fine")
        if share > 0.9:
            raise subprocess.TimeoutExpired("bash", limit_s)
        if share > 0.81:
            raise RuntimeError("failed")
        timers = {f"timing_s/{name}": 1.0 for name in grpo_step.TIMERS}
        proof = {"training/rollout_probs_diff_max": 0.0}
        proof["training/rollout_actor_probs_pearson_corr"] = 1.0
        return [{**timers, **proof}] * steps, {"megabytes": [7, 9]}

    monkeypatch.setattr(grpo_step, "run_arm", run_arm)
    monkeypatch.setattr(largest_utilization, "used_bytes", lambda gpus: [0])
    args = argparse.Namespace(
        folder=tmp_path, grid=0.02, model="tiny", trainer="fsdp2", overrides=[], run_limit_s=9
    )
    return lambda seconds: Search("one-stage", args, time.monotonic() + seconds, lambda: None)


def test_a_search_brackets_the_largest_share(search):
    done = search(1000)
    done.go(0.97)
    row = done.row()
    assert (row["largest"], row["smallest_failed"]) == (0.8, 0.82)
    assert {run["ended"] for run in row["runs"]} == {"ok", "out of memory"}
    assert any(run["why"].startswith("killed after 9 s") for run in row["runs"])


def test_without_time_for_a_run_a_search_ends(search):
    ended = search(5)
    with pytest.raises(TimeIsUp):
        ended.go(0.8)
    assert ended.row()["largest"] is None
