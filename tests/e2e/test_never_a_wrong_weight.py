"""Whatever breaks off, stalls or lies: the engine serves exactly one published version, or nothing.

Each test first brings the engine to a state of its own by good syncs, so that they can run in any
order, or alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_assets import make_assets

from sglang_loader.common.engine_settings import STALE_REQUESTS_VARIABLE
from support.engine_hash import HASH_LOADER
from support.engine_stop import STOP_LOADER
from support.hostile_steps import (
    DEAD_PEER_LIMIT_S,
    EMBEDDING,
    die_with_shared_memory,
    forged_endpoints,
    given_up_sync,
    good_sync,
    good_syncs_of,
    growing_export,
    live_on,
    outlive_a_rank,
    parts_after_a_broken_sync,
    repeated_embeddings,
    syncs_while_streaming,
)
from support.sglang_server import Server, sglang_server
from support.trainer import Step, run_trainer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@dataclass(frozen=True)
class Case:
    """A served model; `hashes` are the engine's, by scale of the weights."""

    server: Server
    folder: Path
    tp: int
    hashes: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The checkpoint."""
        return str(self.folder / "model")

    @property
    def schedulers(self) -> list[int]:
        """The engine's processes that load weights and compute, one for each TP rank."""
        children = psutil.Process(self.server.process.pid).children(recursive=True)
        found = [child.pid for child in children if "scheduler" in " ".join(child.cmdline())]
        assert len(found) == self.tp, [child.cmdline() for child in children]
        return found

    def run(self, step: Step, *args: Any, **options: Any) -> list[Any]:
        """Results of a step by rank, in new trainer processes."""
        outcomes = run_trainer(
            step, self.folder, *args, urls=[self.server.url], tp=self.tp, **options
        )
        assert [outcome.error for outcome in outcomes] == [None] * self.tp
        return [outcome.result for outcome in outcomes]


@pytest.fixture(scope="module")
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    """A real server; its parameter is the TP size and what it does with stale requests."""
    tp, policy = request.param
    folder = tmp_path_factory.mktemp("hostile")
    make_assets(folder)
    variables = {STALE_REQUESTS_VARIABLE: policy}
    with sglang_server(
        folder / "model", folder, tp=tp, loaders=LOADERS, variables=variables
    ) as server:
        yield Case(server, folder, tp)


LOADERS = (HASH_LOADER, STOP_LOADER)

refusing = pytest.mark.parametrize("case", [(1, "refuse 60")], indirect=True, ids=["refuse"])
waiting = pytest.mark.parametrize("case", [(1, "wait 120")], indirect=True, ids=["wait"])
two_ranks = pytest.mark.parametrize("case", [(2, "refuse 60")], indirect=True, ids=["tp2"])

NUM_SYNCS = 10
MARGIN_S = 6.0
"""For a machine that is busy, beyond each limit."""

ENDPOINTS = (
    "a TCP port that is closed",
    "a TCP port",
    "a name that is looked up",
    "another process's socket",
    "nobody in our folder",
)
IN_LOAD = True
WAYS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "in place, without export": ("compiled", {}, not IN_LOAD),
    "staged": ("compiled", {"recheck_every_n_syncs": 1, "read_in_place": False}, IN_LOAD),
    "flattened": ("flattened", {}, IN_LOAD),
}
"""Mode, settings, where the engine stops. With the recheck every sync is loaded eagerly, too."""


@refusing
@pytest.mark.parametrize("way", WAYS)
def test_a_sync_that_its_trainer_has_given_up_is_never_published(case: Case, way: str) -> None:
    """The scheduler stops when it has joined, or in its first load, and goes on when the trainer
    has raised, and its tensors are garbage."""
    pids = case.schedulers
    try:
        [seen] = case.run(given_up_sync, case.model, str(case.folder), pids, *WAYS[way])
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert set(seen["good"]) == {None}
    assert seen["were stopped"] == [True]
    assert seen["error"] is not None
    then = seen["then"]
    assert then["versions"] == ["good"], "what was given up was published"
    if then["status"] != 503:
        assert then["status"] == 200
        assert then["hashes"] == seen["hashes"]["1.0"], "what is served was never published"
    assert seen["next"] == {
        "error": None,
        "version": "next",
        "status": 200,
        "hashes": seen["hashes"]["0.5"],
    }


@waiting
@pytest.mark.parametrize(("mode", "refusal"), [("flattened", "rubbish"), ("compiled", "running")])
def test_after_a_refused_update_no_request_mixes_two_versions(
    case: Case, mode: str, refusal: str
) -> None:
    """Streams without a break while ten syncs come; what was refused has touched nothing."""
    [seen] = case.run(syncs_while_streaming, case.model, mode, refusal, NUM_SYNCS)
    half, whole = (seen["references"][scale] for scale in ("0.5", "1.0"))
    assert all(a != b for a, b in zip(half, whole, strict=True))
    assert seen["unsynced"] == whole, "greedy answers depend on what else runs"
    assert set(seen["refused"]) == {400}
    mixed = [ids for number, ids in seen["answers"] if ids not in (half[number], whole[number])]
    assert not mixed, f"{len(mixed)} of {len(seen['answers'])} answers are of no version"
    assert seen["errors"] == [None] * NUM_SYNCS
    for reference in (half, whole):
        assert any(ids == reference[number] for number, ids in seen["answers"])


@refusing
@pytest.mark.parametrize(("mode", "how"), [("flattened", "raises"), ("compiled", "doubles")])
def test_after_a_sync_that_broke_off_only_a_whole_one_is_served(
    case: Case, mode: str, how: str
) -> None:
    [seen] = case.run(parts_after_a_broken_sync, case.model, str(case.folder), mode, how)
    for part, syncs in seen.items():
        for name in ("before", "whole"):
            good = syncs[name]
            assert (good["error"], good["status"], good["version"]) == (None, 200, name), part
            assert good["hashes"] == syncs["before"]["hashes"]
        assert syncs["broken"]["error"] is not None
        assert syncs["broken"]["hashes"] != syncs["before"]["hashes"], "it broke off too early"
        for name in ("broken", "part"):
            assert (syncs[name]["status"], syncs[name]["version"]) == (503, "before"), (part, name)


@refusing
def test_an_export_that_grows_is_loaded_right(case: Case) -> None:
    """The bucket that ended the shorter one is not the last any more."""
    [seen] = case.run(growing_export, case.model, str(case.folder))
    assert set(seen["errors"]) == {None}
    for scale, hashes in seen["hashes"].items():
        assert hashes == [hashes[0]] * len(hashes), f"other weights than those of {scale}"


DEAD = [("flattened", 1), ("compiled", 0)]


@two_ranks
@pytest.mark.parametrize(("mode", "victim"), DEAD)
def test_a_rank_that_is_killed_is_named_by_the_others_in_time(
    case: Case, mode: str, victim: int
) -> None:
    file = f"{mode}-{victim}.json"
    arguments = (case.model, str(case.folder))
    outcomes = run_trainer(
        outlive_a_rank,
        case.folder,
        *(*arguments, mode, victim, file),
        urls=[case.server.url],
        tp=case.tp,
    )
    assert (case.folder / file).exists(), outcomes
    seen = json.loads((case.folder / file).read_text())
    assert seen["kind"] == "WeightSyncError", seen
    assert re.search(rf"(?<!TP )\brank {victim}\b", seen["text"]), seen["text"]
    assert seen["seconds"] < DEAD_PEER_LIMIT_S + MARGIN_S
    results = case.run(good_syncs_of, *arguments, mode)
    for scale in ("0.5", "1.0"):
        good = [rank[scale] for rank in results]
        assert [rank["error"] for rank in good] == [None] * case.tp
        assert good[0]["version"] == f"{mode} {scale}"
        assert max(rank["seconds"] for rank in good) < 60
        # The same in all modes: the first test that comes here finds them.
        assert good[0]["hashes"] == case.hashes.setdefault(scale, good[0]["hashes"])
    assert case.hashes["0.5"] != case.hashes["1.0"]


@refusing
def test_a_session_at_an_endpoint_of_another_kind_is_refused_at_once(case: Case) -> None:
    """The engine goes on serving what it had; nothing is connected to."""
    [seen] = case.run(forged_endpoints, case.model, str(case.folder))
    for name in ENDPOINTS:
        forged = seen[name]
        assert forged["num_forged"] == 1
        assert forged["error"] is not None
        limit_s = 5 if name == "nobody in our folder" else 2
        assert forged["seconds"] < limit_s + MARGIN_S, name
        assert forged["served_s"] < limit_s + 2 * MARGIN_S, name
        assert (forged["status"], forged["version"]) == (200, "before"), name
        assert forged["hashes"] == seen["before"], name
    assert not seen["was connected"]
    assert seen["next"] is None


@refusing
@pytest.mark.parametrize("mode", ["flattened"])
def test_an_embedding_that_comes_again_with_other_values_is_an_error(case: Case, mode: str) -> None:
    [seen] = case.run(repeated_embeddings, case.model, str(case.folder), mode)
    for name in ("a copy", "a copy again"):
        assert seen[name]["error"] is None
        assert seen[name]["version"] == name
        assert seen[name]["hashes"] == seen["a copy"]["hashes"]
    for name in ("other values", "one other value"):
        assert seen[name]["error"] is not None, f"{name}: dropped without a word"
        assert EMBEDDING in seen[name]["error"]
        assert seen[name]["version"] == "a copy"


@refusing
@pytest.mark.slow
def test_what_killed_trainers_leave_is_removed_by_the_next_one(case: Case) -> None:
    """And nothing of a trainer that lives: it can go on."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # a socket's path must be short
    arguments = (case.model, str(folder))
    environment = {"TMPDIR": str(folder)}
    try:
        with ThreadPoolExecutor(1) as pool:
            living = pool.submit(case.run, live_on, *arguments, environment=environment)
            try:
                lives = wait_for(folder / "live", living)
                run_trainer(
                    die_with_shared_memory,
                    case.folder,
                    *arguments,
                    urls=[case.server.url],
                    environment=environment,
                )
                left = set(json.loads((folder / "dead").read_text())) - lives
                assert any("weight-sync-" in path for path in left), "control"
                assert any("torch_" in path for path in left), "control"
                [good] = case.run(good_sync, *arguments, "compiled", 1.0, environment=environment)
                assert good["error"] is None
                still = those_that_stay(left)
                gone = {path for path in lives if not Path(path).exists()}
            finally:
                (folder / "go").touch()
            [result] = living.result(300)
    finally:
        shutil.rmtree(folder)
    assert result["errors"] == [None] * 4
    assert result["hashes"] != good["hashes"], "the living trainer's last sync has other weights"
    assert not gone, "taken from a trainer that lives"
    assert not still, f"nobody has removed what a killed trainer left: {sorted(still)}"


def those_that_stay(paths: set[str], timeout_s: float = 20) -> set[str]:
    """The paths that still exist then."""
    deadline = time.monotonic() + timeout_s
    while (still := {path for path in paths if Path(path).exists()}) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    return still


def wait_for(file: Path, process: Future[Any], timeout_s: float = 120) -> set[str]:
    """The paths that a trainer tells of, as soon as it does."""
    deadline = time.monotonic() + timeout_s
    while not file.exists():
        assert not process.done(), process.result()
        assert time.monotonic() < deadline, f"there is no {file}"
        time.sleep(0.1)
    return set(json.loads(file.read_text()))
