"""After a sync the engine's weights equal the trainer's bit for bit, hashed inside the engine.

One server per model and TP size: it loads checkpoint A from disk (the reference hash), is synced to
other weights B (the hash must change), and is synced back to A (the reference must return).
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_assets import make_assets

from support.engine_hash import HASH_LOADER
from support.engine_steps import MODES, SCALES, exercise_engine, store_tied_head
from support.manifest_steps import DOUBLED, LOST, STRANGE
from support.session_steps import die_mid_session, faults_and_good_syncs, good_syncs
from support.sglang_server import Server, sglang_server
from support.trainer import Outcome, Step, run_trainer

pytestmark = pytest.mark.e2e


@dataclass(frozen=True)
class Case:
    """A served model and what its trainer ranks saw."""

    server: Server
    outcomes: list[Outcome]
    folder: Path
    tp: int

    def run(self, step: Step, *args: str) -> list[Outcome]:
        """Run new trainer processes against the server."""
        return run_trainer(step, self.folder, *args, urls=[self.server.url], tp=self.tp)

    def check_recovered(self, good: dict[str, Any]) -> None:
        """The engine lives, and what `good_syncs` saw is right and prompt."""
        assert good["hashes"] == self.leader["reference"]
        assert good["num_replayed"] > 0
        assert good["seconds"] < 20
        assert self.server.process.poll() is None

    @property
    def leader(self) -> dict[str, Any]:
        """What the replica's leader saw."""
        assert [outcome.error for outcome in self.outcomes] == [None] * len(self.outcomes)
        seen: dict[str, Any] = self.outcomes[0].result
        return seen


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("qwen3", False, 1), id="dense-untied-tp1", marks=pytest.mark.slow),
        pytest.param(("qwen3", True, 2), id="dense-tied-tp2", marks=pytest.mark.slow),
        pytest.param(("qwen3_moe", True, 1), id="moe-tied-tp1", marks=pytest.mark.slow),
        pytest.param(("qwen3_moe", False, 2), id="moe-untied-tp2"),
    ],
)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    """A real server of a tiny model, exercised by real trainer ranks."""
    architecture, tied, tp = request.param
    folder = tmp_path_factory.mktemp("engine")
    make_assets(folder, architecture=architecture, tied=tied)
    model = folder / "model"
    if tied and architecture == "qwen3_moe":
        store_tied_head(model)
    with sglang_server(model, folder, tp=tp, loaders=(HASH_LOADER,)) as server:
        outcomes = run_trainer(
            exercise_engine, folder, str(model), str(folder), urls=[server.url], tp=tp
        )
        yield Case(server, outcomes, folder, tp)


@pytest.mark.parametrize("mode", MODES)
def test_sync_is_bit_exact(case: Case, mode: str) -> None:
    reference, seen = case.leader["reference"], case.leader[mode]
    assert len(reference) == len(case.outcomes)
    for before, after in zip(reference, seen["changed"], strict=True):
        assert before.keys() == after.keys()
        assert not [name for name in before if before[name] == after[name]]
    assert seen["restored"] == reference


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_load_is_named_on_every_rank(case: Case, mode: str) -> None:
    for outcome in case.outcomes:
        failure = outcome.result[mode]["failure"]
        assert failure.startswith("weight sync failed")
        assert "rank 0: Traceback" in failure
        assert "TP rank 0" in failure


@pytest.mark.parametrize("mode", MODES)
def test_the_sync_after_a_failed_one_is_right(case: Case, mode: str) -> None:
    assert case.leader[mode]["recovered"] == case.leader["reference"]


def the_error(case: Case, mode: str, what: str) -> str:
    """That of one sync, the same on all ranks."""
    errors = {str(outcome.result["manifest"][mode][what]) for outcome in case.outcomes}
    assert len(errors) == 1, errors
    return errors.pop()


@pytest.mark.parametrize("mode", MODES)
def test_a_tensor_that_the_loader_refuses_is_named(case: Case, mode: str) -> None:
    assert f"load_weights failed at {DOUBLED} [128]: " in the_error(case, mode, "refused")


@pytest.mark.parametrize("mode", MODES)
def test_tensors_that_are_missing_or_dropped_are_named_and_not_published(
    case: Case, mode: str
) -> None:
    """Also where they come again, or in an export that cannot be repeated."""
    for what in ("dropped", "one shot", "less"):
        error = the_error(case, mode, what)
        assert "nothing is published: the weights do not fit the engine's model" in error
        assert f"1 missing: {LOST}" in error
        assert (f"1 unexpected: {STRANGE}" in error) == (what != "less")
    assert "None" not in the_error(case, mode, "dropped")
    assert the_error(case, mode, "good") == str([None] * 4)
    assert case.leader["manifest"][mode]["hashes"] == case.leader["reference"]


def test_a_warning_lets_the_sync_go_on_and_is_logged_once(case: Case) -> None:
    seen = [outcome.result["manifest"] for outcome in case.outcomes]
    assert [rank["warned"] for rank in seen] == [[None, None]] * case.tp
    assert [len(rank["said"]) for rank in seen] == [1] + [0] * (case.tp - 1)
    assert f"1 missing: {LOST}" in seen[0]["said"][0]


def test_the_engine_survived_and_reports_the_last_version(case: Case) -> None:
    assert case.leader["repeated"] == "ok"
    assert case.server.process.poll() is None
    with urllib.request.urlopen(f"{case.server.url}/model_info", timeout=10) as reply:
        assert json.loads(reply.read())["weight_version"] == str(SCALES[-1])


def test_compiled_syncs_replay_what_the_eager_loader_does(case: Case) -> None:
    syncs = case.leader["syncs"]
    eager = [hashes for hashes, _ in syncs["eager"]]
    assert len({json.dumps(hashes) for hashes in eager}) == len(SCALES)
    for compiled in syncs["compiled"]:
        assert [hashes for hashes, _ in compiled] == eager
        reports = [report for _, report in compiled]
        assert all(report["num_buckets"] > 2 for report in reports)
        checked = sum("check" in (report["eager_reason"] or "") for report in reports[1:])
        replayed = sum(report["num_replayed"] == report["num_buckets"] for report in reports[1:])
        assert replayed == len(SCALES) - 1 - checked, reports


def test_the_rechecks_come_when_they_are_due(case: Case) -> None:
    _, _, rechecked = case.leader["syncs"]["compiled"]
    reasons = [report["eager_reason"] for _, report in rechecked]
    due = ["due for a check" in (reason or "") for reason in reasons]
    assert due == [True, False, True, False]  # the syncs before were replayed without one


def test_a_rank_is_sent_what_it_reads(case: Case) -> None:
    ordered, freed, rechecked = case.leader["syncs"]["compiled"]
    for _, report in [ordered[0], freed[0], rechecked[0]]:
        assert report["num_arranged"] == 0, "nothing is known before the first sync"
        assert report["sent_bytes"] == report["payload_bytes"]
    for _, report in [*ordered[1:], *freed[1:]]:
        assert report["sent_bytes"] <= report["payload_bytes"]
        if case.tp > 1:
            assert report["num_arranged"] > 0.8 * report["num_buckets"]
            assert report["sent_bytes"] < 0.6 * report["payload_bytes"]
    if case.tp > 1:
        arranged = [report["num_arranged"] > 0 for _, report in rechecked]
        assert arranged == [False, True, False, True], "a check needs whole buckets"
        staged = [report["staging_bytes"] for _, report in ordered]
        assert staged[1] < staged[0]


def test_sharded_trainers_exchange_what_the_engines_read(case: Case) -> None:
    """FSDP2's shards over two ranks to TP 2: no rank gathers a weight once that is proven."""
    for outcome in case.outcomes:
        syncs = outcome.result["syncs"]
        if case.tp == 1:
            assert syncs["sharded"] == []
            continue
        plain, rechecked = syncs["sharded"]
        for rows in (plain, rechecked):
            assert [hashes for hashes, _ in rows] == [hashes for hashes, _ in syncs["eager"]]
        exchanged = [report["num_exchanged"] for _, report in plain]
        assert exchanged == [0, *(report["num_buckets"] for _, report in plain[1:])]
        for _, report in plain[1:]:
            assert report["num_arranged"] > 0.8 * report["num_buckets"]
            assert report["sent_bytes"] < 0.6 * report["payload_bytes"]
            assert "export" not in report["seconds"], "nobody gathered"
            assert report["seconds"]["gather"] > 0
        used = [report["num_exchanged"] > 0 for _, report in rechecked]
        assert used == [False, True, False, True], "a check needs the full export"


def test_an_exchange_after_a_failed_one_is_right(case: Case) -> None:
    """The engine keeps its arrangements when a sync fails; the trainer has forgotten them."""
    for outcome in case.outcomes:
        syncs = outcome.result["syncs"]
        for rows in syncs["exchanged after a failure"]:
            assert [hashes for hashes, _ in rows] == [hashes for hashes, _ in syncs["eager"]]
            used = [report["num_exchanged"] > 0 for _, report in rows]
            assert used == [False, True, False, True], "what was prepared is forgotten"


def test_engines_pull_parameters_that_the_trainer_keeps(case: Case) -> None:
    """Full tensors on every rank, or shards over all ranks, written anew before every sync."""
    for outcome in case.outcomes:
        syncs = outcome.result["syncs"]
        eager = [hashes for hashes, _ in syncs["eager"]]
        every, rechecked = [False, True, True, True], [False, True, False, True]
        for rows, pulled in zip(syncs["pulled"], (every, rechecked) * 2, strict=True):
            assert [hashes for hashes, _ in rows] == eager
            reports = [report for _, report in rows]
            assert [report["num_pulled"] > 0 for report in reports] == pulled
            for report in reports:
                assert report["num_pulled"] in (0, report["num_buckets"])
                assert report["num_tensors"] == reports[0]["num_tensors"]
                assert report["payload_bytes"] == reports[0]["payload_bytes"]
                told = report["engine_seconds"]
                assert told.keys() == {"waiting", "launching", "copying"}
                assert min(told.values()) >= 0 < told["launching"] < 10
            last = reports[-1]
            assert last["num_replayed"] == last["num_buckets"]
            assert last["staging_bytes"] == 0
            assert "export" not in last["seconds"], "nobody gathered"


def test_a_parameter_that_moved_is_noticed_before_the_commit(case: Case) -> None:
    """On one rank alone, after the engines were told to read where it had been."""
    for outcome in case.outcomes:
        syncs = outcome.result["syncs"]
        for moved in syncs["moved"]:
            assert [hashes for hashes, _ in moved] == [hashes for hashes, _ in syncs["eager"]]
            reports = [report for _, report in moved]
            assert [report["num_pulled"] > 0 for report in reports] == [False, True, True, True]
            assert [report["num_tensors"] for report in reports] == [reports[0]["num_tensors"]] * 4
            assert reports[2]["seconds"]["confirm"] > 0


def test_the_engine_survives_trainers_that_die_mid_session(case: Case) -> None:
    outcomes = case.run(die_mid_session, str(case.folder / "model"))
    assert all(outcome.error is not None for outcome in outcomes)
    outcomes = case.run(good_syncs, str(case.folder / "model"), str(case.folder))
    assert [outcome.error for outcome in outcomes] == [None] * case.tp
    case.check_recovered(outcomes[0].result)
    assert "the trainer's process is gone" in case.server.log.read_text()


def test_a_failure_is_raised_on_all_ranks_alike_and_the_next_sync_is_good(case: Case) -> None:
    outcomes = case.run(faults_and_good_syncs, str(case.folder / "model"), str(case.folder))
    assert [outcome.error for outcome in outcomes] == [None] * case.tp
    for outcome in outcomes:
        forged = outcome.result["arranged by something else"]
        assert "bucket 0 came arranged by '0000" in forged["error"]
        assert "for this sync the engine holds" in forged["error"]
        before, then, failed, after = forged["num_arranged"]
        assert before == failed == 0, "the sync after a failed one is whole"
        assert (then > 0) == (after > 0) == (case.tp > 1 or then > 0)
    assert outcomes[0].result["arranged by something else"]["hashes"] == case.leader["reference"]
    for name, expected in (
        ("a rank that cannot pack", (f"rank {case.tp - 1}: Traceback", "meta tensor")),
        ("a wrong token", ("weight sync failed", "wrong token")),
    ):
        errors = {outcome.result[name]["error"] for outcome in outcomes}
        assert len(errors) == 1, errors
        assert all(text in next(iter(errors)) for text in expected)
        case.check_recovered(outcomes[0].result[name]["good"])
