"""The quickstart's table shows what the reports say, whatever stages those have."""

import io

from quickstart import Step, stages_of, table_of
from rich.console import Console

METRICS = {
    "training/rollout_probs_diff_max": 1e-7,
    "training/rollout_actor_probs_pearson_corr": 1.0,
}
FIRST = ("resume_weights", "open", "export", "pack", "load", "publish", "learn")
LATER = ("release", "resume_weights", "open", "confirm", "load", "publish", "resume_kv_cache")


def step(*stages):
    sync = {"num_buckets": 2, "num_tensors": 3, "payload_bytes": 4}
    sync["seconds"] = {stage: 0.5 + number for number, stage in enumerate(stages)}
    return Step(METRICS, sync)


def test_all_stages_appear_in_sync_order():
    stages = stages_of([step(*FIRST), step(*LATER)])
    assert sorted(stages) == sorted({*FIRST, *LATER})
    for sync in (FIRST, LATER):
        assert [stage for stage in stages if stage in sync] == list(sync)


def test_unknown_stages_appear_and_missing_are_blank():
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(table_of([step("open"), step("open", "a_new_stage")]))
    (line,) = (line for line in console.export_text().splitlines() if "a new stage" in line)
    assert line.count("1.500 s") == 1
    assert "0.000" not in line
