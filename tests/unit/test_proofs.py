"""A proof that a user asks a server for: the server's endpoints, and what the trainer ranks do."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.aio_rwlock import RWLock
from sglang.srt.utils.auth import add_api_key_middleware
from typer.testing import CliRunner

from sglang_loader.common.session.messages import SESSION_FORMAT
from sglang_loader.hooks import http as http_hooks
from sglang_loader.hooks import proof_requests as proof_hooks
from sglang_loader.hooks.proof_requests import Proofs, add_endpoints, proof_fact
from sglang_loader.session.proof import HeldWeights
from sglang_loader.upstream import facts_of, with_facts
from unit import route_ranks
from unit.serving_engine import ByName, ServingEngine, colocated, synced
from unit.test_session_commit import SETTINGS
from verl_sglang_sync import report as reports
from verl_sglang_sync.commands import cli
from verl_sglang_sync.commands import prove as command
from verl_sglang_sync.engine.server_client.errors import NotAuthorized, RequestFailed
from verl_sglang_sync.engine.session import TrainerSession
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.sync.sessions import Sessions
from verl_sglang_sync.trainer_ranks import TrainerRanks

WEIGHTS = [("a", torch.arange(60.0)), ("b", torch.arange(60.0) + 1)]
NOTHING = Proofs().fields


@pytest.fixture(autouse=True)
def proofs(monkeypatch):
    """Those of a new process."""
    made = Proofs()
    for module in (http_hooks, proof_hooks):
        monkeypatch.setattr(module, "proofs", made)
    return made


# In the process that serves HTTP.


def test_asking_needs_the_keys_of_an_update(proofs):
    app = FastAPI()
    for _ in range(2):
        add_endpoints(app)
    assert len([r for r in app.routes if getattr(r, "path", "").startswith("/weight_sync/")]) == 2
    add_api_key_middleware(app, api_key="user", admin_api_key="admin")
    client = TestClient(app)
    headers = {key: {"Authorization": f"Bearer {key}"} for key in ("user", "admin")}
    for wrong in ({}, headers["user"]):
        assert client.post("/weight_sync/prove", headers=wrong).status_code == 401
    assert client.get("/weight_sync/proof").status_code == 401
    assert client.get("/weight_sync/proof", headers=headers["user"]).json() == NOTHING
    for _ in range(2):
        asked = client.post("/weight_sync/prove", headers=headers["admin"])
        assert (asked.status_code, asked.json()) == (200, {**NOTHING, "requested": True})
    assert proofs.requested


def updated(fact, version="7", *, asks_meanwhile=False):
    """One update whose session has proven that; what the schedulers were asked.

    Args:
        asks_meanwhile: a user asks while the session runs.
    """
    asked = []

    async def schedulers(request):
        asked.append(facts_of(request))
        if asks_meanwhile:
            await proof_hooks.prove()
        return [with_facts(SimpleNamespace(), closed=None, is_busy=False, proof=fact)]

    arguments = SimpleNamespace(load_format="auto")
    manager = SimpleNamespace(model_update_lock=RWLock(), server_args=arguments)
    request = SimpleNamespace(load_format=SESSION_FORMAT, weight_version=version, rid="a client's")
    asyncio.run(http_hooks.ask_for_update(manager, schedulers, request))
    return asked[0]["wants_proof"]


def test_a_request_stays_until_a_proof(proofs):
    assert not updated(None)
    asyncio.run(proof_hooks.prove())
    assert updated(None) and proofs.number == 0
    # A way is refused before it brings weights that are served.
    assert updated(proof_fact("route", ["w"], is_good=False))
    assert (proofs.number, proofs.is_proven, proofs.requested) == (1, False, True)
    assert updated(proof_fact("served", [], is_good=False)) and proofs.number == 1
    assert updated(proof_fact("served", [], is_good=True), "8")
    assert not updated(None)
    last = asyncio.run(proof_hooks.last_proof())
    assert last.pop("seconds") >= 0
    assert last == {
        "number": 2,
        "weight_version": "8",
        "is_proven": True,
        "differing": [],
        "requested": False,
    }
    updated(proof_fact("served", ["v", "w"], is_good=True))
    assert (proofs.number, proofs.is_proven, proofs.differing) == (3, False, ["v", "w"])


def test_a_running_proof_answers_no_later_request(proofs):
    good = proof_fact("served", [], is_good=True)
    assert not updated(good, asks_meanwhile=True)
    assert (proofs.number, proofs.requested) == (1, True)
    assert updated(good, asks_meanwhile=True)
    assert (proofs.number, proofs.requested) == (2, True)
    assert updated(good) and not proofs.requested


def test_an_update_of_others_stays_unchanged():
    async def schedulers(request):
        assert request.rid == "a client's"
        return []

    request = SimpleNamespace(load_format=None, rid="a client's")
    asyncio.run(http_hooks.ask_for_update(None, schedulers, request))


# In the trainer.


class Beside(TrainerRanks):
    """With another rank, which asks for a proof, and may be unable to make one."""

    def __init__(self, can_prove):
        super().__init__()
        self._can_prove = can_prove

    def _exchange(self, turn):
        return [turn, replace(turn, item=(True, self._can_prove, []))]


@pytest.mark.parametrize("here", (True, False))
@pytest.mark.parametrize("there", (True, False))
def test_ranks_agree_to_prove_where_all_can(here, there):
    sessions = Sessions(Beside(there), SETTINGS, SyncReport(mode="compiled", replica=0))
    assert sessions.wait_joined(can_prove=here) == (here and there)
    assert not sessions.asks_for_proof


@pytest.mark.parametrize("route", ["pull", "exchange"])
def test_a_requested_proof_covers_all_ranks(pool, route):
    """The model has norms that are all ones, so that the second sync is proven as well, and the
    tenth, which an early proof does not put off.
    """
    steps = ["sync", *["step", "sync"] * 2, "step", ("ask", True), "sync", ("ask", False)]
    steps += ["step", "sync"] * 6
    options = {"route": route, "kind": "moe"}
    for seen in route_ranks.play(pool, route_ranks.Rank, options, *steps):
        assert seen["routes"] == ["export", *[route] * 9] and not seen["errors"]
        assert seen["proven"] == [True, True, None, True, *[None] * 5, True]


def one_rank(*, wants_proof, **keys):
    engine = ServingEngine()
    engine.models = [ByName(WEIGHTS)]
    engine.wants_proof = wants_proof
    return engine, colocated(engine, "compiled", manifest_check="off", request_timeout_s=30, **keys)


@pytest.mark.parametrize("every", (0, 1))
def test_an_unrepeatable_export_is_synced_unproven(every, caplog):
    engine, weight_sync = one_rank(wants_proof=not every, prove_every_n_syncs=every)
    reports.warn_once.cache_clear()
    assert synced(weight_sync, iter(WEIGHTS)).is_proven is None
    assert "a proof is due and is left out, so that nothing is compared" in caplog.text
    assert engine.num_published == 1
    assert synced(weight_sync, WEIGHTS).is_proven and engine.num_published == 3


def test_a_proof_that_breaks_has_proven_nothing(monkeypatch, caplog):
    engine, weight_sync = one_rank(wants_proof=False)
    synced(weight_sync, WEIGHTS)
    engine.wants_proof = True
    monkeypatch.setattr(HeldWeights, "of", Mock(side_effect=MemoryError("no memory")))
    commit, is_last = TrainerSession.commit, []

    def noted(session, watch, **keys):
        is_last.append(keys["is_last"])
        commit(session, watch, **keys)

    monkeypatch.setattr(TrainerSession, "commit", noted)
    report = synced(weight_sync, WEIGHTS)
    assert "not proven, exported in full again" in caplog.text
    assert report.is_proven is None and "proven" not in str(report)
    assert is_last == [False, True], "the last session opens the gates"


# The command.


class Server:
    """Replies to the command, one after the other; an error is raised."""

    def __init__(self, *replies):
        self._replies = list(replies)

    def __call__(self, url, **access):
        return self

    def run(self, call):
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply


ASKED = {**NOTHING, "number": 1, "requested": True, "is_proven": False, "differing": ["old"]}
REFUSED = {**ASKED, "number": 2, "differing": ["refused way"]}
GOOD = {**NOTHING, "number": 3, "weight_version": "8", "is_proven": True, "seconds": 1.5}
BAD = {**GOOD, "is_proven": False, "differing": ["lm_head.weight"]}


@pytest.mark.parametrize(
    ("replies", "status", "text"),
    [
        ((ASKED, ASKED, REFUSED, GOOD), 0, "proven: http://h:1 at weight version 8 serves the"),
        ((ASKED, BAD), 1, "1 tensors had other bytes than the full export: lm_head.weight"),
        ((ASKED,), 2, "no sync was proven within 0.05 s"),
        ((NotAuthorized("no", status=401),), 2, "--admin-api-key"),
        ((RequestFailed("no", status=404),), 2, "not launched with the loaders"),
    ],
)
def test_the_command_says_what_was_proven(replies, status, text, monkeypatch):
    monkeypatch.setattr(command, "SGLangServerClient", Server(*replies))
    monkeypatch.setattr(command, "POLL_S", 0.001)
    timeout = "0.05" if len(replies) == 1 else "30"
    done = CliRunner().invoke(cli.app, ["prove", "http://h:1", "--timeout-s", timeout])
    assert done.exit_code == status, done.output
    assert text in done.output and done.output.count("\n") == 1


def test_the_command_refuses_what_is_no_url():
    done = CliRunner().invoke(cli.app, ["prove", "h:1"])
    assert done.exit_code == 2 and "URL='h:1'" in done.output
