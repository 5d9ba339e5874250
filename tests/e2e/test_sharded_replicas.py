"""FSDP2's shards over two ranks to two engines of TP 1: each engine reads all of every weight."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from tiny_assets import make_assets

from support.engine_steps import SCALES, sharded_replicas
from support.remote import results_of
from support.sglang_server import sglang_server
from support.trainer import run_trainer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_ranks_exchange_whole_buckets(tmp_path: Path) -> None:
    make_assets(tmp_path, architecture="qwen3_moe")
    with ExitStack() as stack:
        urls = []
        for number in range(2):
            folder = tmp_path / f"replica{number}"
            folder.mkdir()
            server = stack.enter_context(sglang_server(tmp_path / "model", folder))
            urls.append(server.url)
        results = results_of(run_trainer(sharded_replicas, tmp_path, urls=urls))
    for result in results:
        eager = [hashes for hashes, _ in result["eager"]]
        assert len({json.dumps(hashes) for hashes in eager}) == len(SCALES)
        for rows in (result["pulled"], *result["sharded"]):
            assert [hashes for hashes, _ in rows] == eager
        pulled, plain, rechecked = (
            [report for _, report in rows] for rows in (result["pulled"], *result["sharded"])
        )
        assert [report["num_pulled"] > 0 for report in pulled] == [False, True, True, True]
        assert pulled[-1]["staging_bytes"] == 0
        for report in (plain[2], rechecked[3]):
            assert report["num_exchanged"] == report["num_buckets"]
            assert report["num_arranged"] == 0
            assert report["sent_bytes"] == report["payload_bytes"]
            assert "export" not in report["seconds"], "nobody gathered"
        # The first sync is recorded: an engine that has a plan and says nothing reads all.
        used = [report["num_exchanged"] > 0 for report in plain]
        assert used == [False, True, True, True]
        assert plain[-1]["num_replayed"] == plain[-1]["num_buckets"]
        used = [report["num_exchanged"] > 0 for report in rechecked]
        assert used == [False, True, False, True], "a check needs the full export"
