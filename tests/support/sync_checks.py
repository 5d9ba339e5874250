"""What must hold of `engine_steps.syncs_in_a_row`, whatever the engine runs on."""

from __future__ import annotations

import json
from typing import Any

from support.engine_steps import SCALES


def check_syncs_in_a_row(syncs: dict[str, Any], tp: int) -> None:
    """Every way of a sync leaves, each time, the bytes that the eager loader does, and the last of
    each way is replayed.
    """
    eager = [hashes for hashes, _ in syncs["eager"]]
    is_leader = bool(eager[0])  # else this rank has no engine to look at
    assert len({json.dumps(hashes) for hashes in eager}) == (len(SCALES) if is_leader else 1)
    failed = [syncs["exchanged after a failure"]] if tp > 1 else []
    staged, direct = [*syncs["compiled"], *syncs["sharded"]], [*syncs["pulled"], *syncs["moved"]]
    for rows in (*staged, *failed, *direct):
        assert [hashes for hashes, _ in rows] == eager
        last = rows[-1][1]
        assert last["num_replayed"] == last["num_buckets"], last["eager_reason"]
    for rows in syncs["compiled"] if is_leader else ():
        reports = [report for _, report in rows[1:]]
        checked = sum("check" in (report["eager_reason"] or "") for report in reports)
        replayed = sum(report["num_replayed"] == report["num_buckets"] for report in reports)
        assert replayed == len(SCALES) - 1 - checked, reports
    for rows in syncs["sharded"]:
        assert rows[-1][1]["num_exchanged"] == rows[-1][1]["num_buckets"]
    for rows in syncs["pulled"]:
        assert rows[-1][1]["num_pulled"] == rows[-1][1]["num_buckets"]
    assert len(syncs["sharded"]) == (2 if tp > 1 else 0)
    assert (len(syncs["compiled"]), len(syncs["pulled"]), len(syncs["moved"])) == (3, 4, 2)
