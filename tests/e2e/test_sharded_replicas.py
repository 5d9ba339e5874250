"""FSDP2's shards over two ranks to two engines of TP 1: each engine reads all of every weight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_assets import make_assets

from support.engine_hash import HASH_LOADER
from support.engine_steps import SCALES, sharded_replicas
from support.sglang_server import sglang_server
from support.trainer import run_trainer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_ranks_exchange_whole_buckets(tmp_path: Path) -> None:
    make_assets(tmp_path, architecture="qwen3_moe")
    model = tmp_path / "model"
    folders = [tmp_path / f"replica{number}" for number in range(2)]
    for folder in folders:
        folder.mkdir()
    with (
        sglang_server(model, folders[0], loaders=(HASH_LOADER,)) as first,
        sglang_server(model, folders[1], loaders=(HASH_LOADER,)) as second,
    ):
        outcomes = run_trainer(
            sharded_replicas,
            tmp_path,
            str(model),
            str(tmp_path),
            urls=[first.url, second.url],
            tp=1,
        )
    assert [outcome.error for outcome in outcomes] == [None, None]
    for outcome in outcomes:
        eager = [hashes for hashes, _ in outcome.result["eager"]]
        assert len({json.dumps(hashes) for hashes in eager}) == len(SCALES)
        pulled = outcome.result["pulled"]
        assert [hashes for hashes, _ in pulled] == eager
        assert [report["num_pulled"] > 0 for _, report in pulled] == [False, True, True, True]
        assert pulled[-1][1]["staging_bytes"] == 0
        plain, rechecked = outcome.result["sharded"]
        for rows in (plain, rechecked):
            assert [hashes for hashes, _ in rows] == eager
            _, report = rows[2]
            assert report["num_exchanged"] == report["num_buckets"]
            assert report["num_arranged"] == 0
            assert report["sent_bytes"] == report["payload_bytes"]
            assert "export" not in report["seconds"], "nobody gathered"
        used = [report["num_exchanged"] > 0 for _, report in plain]
        # The first sync is recorded, the second replayed: then it is known what is read.
        assert used == [False, False, True, True]
        assert plain[-1][1]["num_replayed"] == plain[-1][1]["num_buckets"]
        used = [report["num_exchanged"] > 0 for _, report in rechecked]
        assert used == [False, False, True, False], "a check needs the full export"
