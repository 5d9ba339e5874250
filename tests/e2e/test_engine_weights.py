"""After a sync the engine's weights equal the trainer's bit for bit, hashed inside the engine.

One server per model and TP size: it loads checkpoint A from disk (the reference hash), is synced to
other weights B (the hash must change), and is synced back to A (the reference must return).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
from tiny_assets import make_assets

from support.engine_steps import (
    LOST,
    MODES,
    SCALES,
    STRANGE,
    crash,
    die_mid_session,
    exercise_engine,
    faults_and_good_syncs,
    good_syncs,
)
from support.exports import NORM, store_tied_head
from support.http_requests import get, greedy, post
from support.remote import Outcome, results_of
from support.served import Served, served
from support.sync_checks import check_syncs_in_a_row

pytestmark = pytest.mark.e2e


@dataclass(frozen=True)
class Case:
    """A served model and what its trainer ranks saw."""

    engine: Served
    outcomes: list[Outcome]

    @property
    def tp(self) -> int:
        return self.engine.tp

    @cached_property
    def results(self) -> list[dict[str, Any]]:
        return results_of(self.outcomes)

    @property
    def leader(self) -> dict[str, Any]:
        return self.results[0]

    def check_recovered(self, good: dict[str, Any]) -> None:
        """The engine lives, and what `good_syncs` saw is right and prompt."""
        assert good["hashes"] == self.leader["reference"]
        assert good["num_replayed"] > 0
        assert good["seconds"] < 20
        assert self.engine.lives


@pytest.fixture(
    scope="module",
    params=[
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
    if tied and architecture == "qwen3_moe":
        store_tied_head(folder / "model")
    with served(folder, tp=tp) as engine:
        yield Case(engine, engine.attempt(exercise_engine))


@pytest.mark.parametrize("mode", MODES)
def test_sync_is_bit_exact_also_after_a_failed_one(case: Case, mode: str) -> None:
    reference, seen = case.leader["reference"], case.leader[mode]
    assert len(reference) == len(case.outcomes)
    for before, after in zip(reference, seen["changed"], strict=True):
        assert before.keys() == after.keys()
        assert not [name for name in before if before[name] == after[name]]
    assert seen["restored"] == seen["recovered"] == reference


@pytest.mark.parametrize("mode", MODES)
def test_tensors_that_do_not_fit_are_named_on_every_rank_and_not_published(
    case: Case, mode: str
) -> None:
    """Also where they come again, or in an export that cannot be repeated."""

    def error(what: str) -> str:
        (found,) = {str(result[mode][what]) for result in case.results}
        return found

    assert error("good") == str([None] * 5)
    refused = error("refused")
    assert refused.startswith("weight sync failed")
    assert f"load_weights failed at {NORM} [128]: " in refused
    assert "TP rank 0: Traceback" in refused
    for what in ("dropped", "dropped again", "one shot", "less"):
        assert "nothing is published: the weights do not fit the engine's model" in error(what)
        assert f"1 missing: {LOST}" in error(what)
        assert (f"1 unexpected: {STRANGE}" in error(what)) == (what != "less")


def test_a_warning_lets_the_sync_go_on_and_is_logged_once(case: Case) -> None:
    assert [result["warned"] for result in case.results] == [[None, None]] * case.tp
    assert [len(result["said"]) for result in case.results] == [1] + [0] * (case.tp - 1)
    assert f"1 missing: {LOST}" in case.leader["said"][0]


def test_the_engine_survived_and_reports_the_last_version(case: Case) -> None:
    assert case.engine.lives
    version = json.loads(get(case.engine.url, "model_info").text)["weight_version"]
    assert version == str(SCALES[-1])
    answer = json.loads(post(case.engine.url, "generate", greedy(2)).text)
    assert answer["meta_info"]["weight_version"] == version, "what the tokens were made with"


def test_every_way_of_a_sync_leaves_what_the_eager_loader_does(case: Case) -> None:
    for result in case.results:
        check_syncs_in_a_row(result["syncs"], case.tp)


def test_the_rechecks_come_when_they_are_due(case: Case) -> None:
    _, _, rechecked = case.leader["syncs"]["compiled"]
    reasons = [report["eager_reason"] for _, report in rechecked]
    due = ["due for a check" in (reason or "") for reason in reasons]
    assert due == [True, False, True, False]  # the syncs before were replayed without one


def test_sharded_trainers_exchange_what_the_engines_read(case: Case) -> None:
    """FSDP2's shards over two ranks to TP 2: no rank gathers a weight once that is proven."""
    if case.tp == 1:
        pytest.skip("a trainer of one rank has no shards")
    for syncs in (result["syncs"] for result in case.results):
        plain, rechecked = ([report for _, report in rows] for rows in syncs["sharded"])
        assert plain[0]["num_exchanged"] == 0
        for report in plain[1:]:
            assert report["num_exchanged"] == report["num_buckets"]
            assert report["num_arranged"] > 0.8 * report["num_buckets"]
            assert report["sent_bytes"] < 0.6 * report["payload_bytes"]
            assert "export" not in report["seconds"], "nobody gathered"
            assert report["seconds"]["gather"] > 0
        failed = [report for _, report in syncs["exchanged after a failure"]]
        for reports, why in (
            (rechecked, "a check needs the full export"),
            (failed, "what was prepared for a failed sync is forgotten"),
        ):
            used = [report["num_exchanged"] > 0 for report in reports]
            assert used == [False, True, False, True], why


def test_engines_pull_parameters_that_the_trainer_keeps(case: Case) -> None:
    """Full tensors on every rank, or shards over all ranks, written anew before every sync; one of
    them elsewhere, after the engines were told to read where it had been, in `moved`.
    """
    every, rechecked = [False, True, True, True], [False, True, False, True]
    for syncs in (result["syncs"] for result in case.results):
        ways = (*syncs["pulled"], *syncs["moved"])
        for rows, pulled in zip(ways, (every, rechecked) * 2 + (every,) * 2, strict=True):
            reports = [report for _, report in rows]
            assert [report["num_pulled"] > 0 for report in reports] == pulled
            for report in reports:
                assert report["num_pulled"] in (0, report["num_buckets"])
                assert report["num_tensors"] == reports[0]["num_tensors"]
                assert report["payload_bytes"] == reports[0]["payload_bytes"]
        for rows in syncs["pulled"]:
            for report in (report for _, report in rows):
                told = report["engine_seconds"]
                assert told.keys() == {"waiting", "launching", "copying"}
                assert min(told.values()) >= 0 < told["launching"] < 10
            last = rows[-1][1]
            assert last["num_replayed"] == last["num_buckets"]
            assert last["staging_bytes"] == 0
            assert "export" not in last["seconds"], "nobody gathered"
        for rows in syncs["moved"]:
            assert rows[2][1]["seconds"]["confirm"] > 0, "it is noticed before the commit"


def test_the_engine_survives_trainers_that_die_mid_session(case: Case) -> None:
    outcomes = case.engine.attempt(die_mid_session)
    assert all("exited with 9" in str(outcome.error) for outcome in outcomes)
    case.check_recovered(case.engine.run(good_syncs)[0])
    assert "the trainer's process is gone" in case.engine.server.log.read_text()


def test_a_rank_that_crashes_is_named_with_its_signal_and_traceback(case: Case) -> None:
    for rank, outcome in enumerate(case.engine.attempt(crash)):
        error = str(outcome.error)
        assert error.startswith(f"rank {rank} was killed by SIGSEGV")
        assert "Segmentation fault" in error and "in crash" in error


def test_a_failure_is_raised_on_all_ranks_alike_and_the_next_sync_is_good(case: Case) -> None:
    results = case.engine.run(faults_and_good_syncs)
    for name, expected in (
        ("a rank that cannot pack", (f"rank {case.tp - 1}: Traceback", "meta tensor")),
        ("a wrong token", ("weight sync failed", "wrong token")),
    ):
        (error,) = {result[name]["error"] for result in results}
        assert all(text in error for text in expected)
        case.check_recovered(results[0][name]["good"])
