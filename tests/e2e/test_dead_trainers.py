"""Trainers whose processes are killed: the others name it in time, the next one cleans up."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.dying_steps import (
    DEAD_PEER_LIMIT_S,
    die_with_shared_memory,
    good_syncs,
    live_on,
    outlive_a_rank,
)
from support.served import Served, served

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TP = 2
MARGIN_S = 6.0
"""For a machine that is busy, beyond each limit."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("dead"), tp=TP) as engine:
        yield engine


@pytest.fixture(scope="module")
def hashes(engine: Served) -> list[object]:
    return [good["hashes"] for good in engine.run(good_syncs, "bucketed")[0]]


@pytest.mark.parametrize(("mode", "victim"), [("flattened", 1), ("compiled", 0)])
def test_a_rank_that_is_killed_is_named_by_the_others_in_time(
    engine: Served, hashes: list[object], mode: str, victim: int
) -> None:
    file = f"{mode}-{victim}.json"
    outcomes = engine.attempt(outlive_a_rank, mode, victim, file)
    assert str(outcomes[victim].error).startswith(f"rank {victim} was killed by SIGKILL")
    assert (engine.folder / file).exists(), outcomes
    seen = json.loads((engine.folder / file).read_text())
    assert seen["kind"] == "WeightSyncError", seen
    assert re.search(rf"(?<!TP )\brank {victim}\b", seen["text"]), seen["text"]
    assert seen["seconds"] < DEAD_PEER_LIMIT_S + MARGIN_S
    results = engine.run(good_syncs, mode)
    assert all(good["error"] is None and good["seconds"] < 60 for rank in results for good in rank)
    assert [good["hashes"] for good in results[0]] == hashes
    assert hashes[0] != hashes[1]
    assert engine.version == f"{mode} 1.0"


def test_what_killed_trainers_leave_is_removed_by_the_next_one(
    engine: Served, hashes: list[object]
) -> None:
    """And nothing of a trainer that lives: it can go on."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # a socket's path must be short
    environment = {"environment": {"TMPDIR": str(folder)}}
    try:
        with ThreadPoolExecutor(1) as pool:
            living = pool.submit(engine.run, live_on, str(folder), **environment)
            try:
                wait_until(lambda: (folder / "live").exists() or living.done(), 120)
                if living.done():
                    living.result()
                lives = paths_in(folder / "live")
                engine.attempt(die_with_shared_memory, str(folder), **environment)
                left = paths_in(folder / "dead") - lives
                assert any("weight-sync-" in path.name for path in left), "control"
                assert any("torch_" in path.name for path in left), "control"
                good = engine.run(good_syncs, "compiled", **environment)[0]
                assert [each["error"] for each in good] == [None, None]
                wait_until(lambda: not any(path.exists() for path in left), 20)
                still = {path for path in left if path.exists()}
                gone = {path for path in lives if not path.exists()}
            finally:
                (folder / "go").touch()
            result = living.result(300)[0]
    finally:
        shutil.rmtree(folder)
    assert result["errors"] == [None] * 4
    assert result["hashes"] == hashes[0], "the living trainer's last sync has these weights"
    assert not gone, "taken from a trainer that lives"
    assert not still, f"nobody has removed what a killed trainer left: {sorted(still)}"


def paths_in(file: Path) -> set[Path]:
    return {Path(path) for path in json.loads(file.read_text())}


def wait_until(holds: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)
