"""After a sync the engine's weights equal the trainer's bit for bit, hashed inside the engine.

One server per model and TP size: it loads checkpoint A from disk (the reference hash), is synced to
other weights B (the hash must change), and is synced back to A (the reference must return).
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tiny_assets import make_assets

from support.engine_hash import HASH_LOADER
from support.engine_steps import MODES, exercise_engine
from support.sglang_server import Server, sglang_server
from support.trainer import Outcome, run_trainer

pytestmark = pytest.mark.e2e


@dataclass(frozen=True)
class Case:
    """A served model and what its trainer ranks saw."""

    server: Server
    outcomes: list[Outcome]

    @property
    def leader(self) -> dict[str, Any]:
        """What the replica's leader saw."""
        assert [outcome.error for outcome in self.outcomes] == [None] * len(self.outcomes)
        seen: dict[str, Any] = self.outcomes[0].result
        return seen


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("qwen3", False, 1), id="dense-untied-tp1"),
        pytest.param(("qwen3", True, 2), id="dense-tied-tp2"),
        pytest.param(("qwen3_moe", True, 1), id="moe-tied-tp1"),
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
    with sglang_server(model, folder, tp=tp, loaders=(HASH_LOADER,)) as server:
        outcomes = run_trainer(
            exercise_engine, folder, str(model), str(folder), urls=[server.url], tp=tp
        )
        yield Case(server, outcomes)


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


def test_the_engine_survived_and_reports_the_last_version(case: Case) -> None:
    assert case.leader["repeated"] == "ok"
    assert case.server.process.poll() is None
    with urllib.request.urlopen(f"{case.server.url}/model_info", timeout=10) as reply:
        assert json.loads(reply.read())["weight_version"] == f"{MODES[-1]}-again"
