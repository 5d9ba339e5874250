"""Ranks of a session in step: one that has failed still takes part in what others wait for."""

import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from sglang_loader.common.session.messages import SessionError
from unit.failed_replies import BAD, LOST, FailsReplies, failed_request
from unit.serving_engine import ByName, ServingEngine, colocated, synced
from unit.test_session_commit import SETTINGS
from verl_sglang_sync import WeightSyncError
from verl_sglang_sync.engine.engine_ranks import EngineRank, KnownEngineRank
from verl_sglang_sync.engine.server_client.errors import RequestFailed, ServerError
from verl_sglang_sync.engine.session import EngineFailed, TrainerSession
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.sync.sessions import Sessions
from verl_sglang_sync.trainer_ranks import RankLost, TrainerRanks


class Watched(TrainerRanks):
    """Writes down what this rank tells the others."""

    def __init__(self, events):
        super().__init__()
        self._events = events

    def _exchange(self, turn):
        self._events.append("fails" if turn.failure else "meets")
        return super()._exchange(turn)


@pytest.mark.parametrize(("last", "raised"), [(BAD, str(BAD)), (LOST, "the next one is bad")])
def test_a_rank_with_a_bad_reply_exports_nothing(last, raised, caplog):
    """One that was lost is only logged: the session had told that the weights are published."""
    events = []
    bad = RequestFailed("the next one is bad", endpoint="http://h:1/update", status=400)

    def export():
        for name in ("first", "second"):
            events.append(name)
            yield name, torch.ones(60)

    keys = {"bucket_bytes": 256, "manifest_check": "off", "request_timeout_s": 10}
    weight_sync = colocated(FailsReplies(bad), "compiled", Watched(events), **keys)
    weight_sync._unanswered = [failed_request(last)]
    with pytest.raises(WeightSyncError, match=re.escape(raised)):
        synced(weight_sync, export())
    if last is BAD:
        assert set(events) == {"fails", "meets"}
        assert events[0] == "fails", "the other ranks meet it before they export"
    else:
        assert events.index("meets") < events.index("first") < events.index("fails")
        assert "second" in events, "the other ranks would wait in the export's collectives"
    assert weight_sync._unanswered == [], "said once"
    assert ("the reply was lost" in caplog.text) == (last is LOST)


def test_an_engine_with_lost_reply_may_join():
    lost, bad = failed_request(LOST), failed_request(BAD)
    lost.check_answer()
    for check in (lost.check, bad.check, bad.check_answer):
        with pytest.raises(ServerError):
            check()


@pytest.mark.parametrize(
    ("is_silent", "text"),
    [(True, "may serve the new weights already"), (False, "weights may be incomplete")],
)
def test_a_commit_without_outcome_may_be_served(is_silent, text, monkeypatch):
    """Where the engine says that it publishes nothing, it is not."""
    if is_silent:
        silent = Mock(side_effect=SessionError("no message from the engine"))
        monkeypatch.setattr(TrainerSession, "wait_until_published", silent)
    engine = ServingEngine()
    engine.refuses = None if is_silent else "these do not fit"
    weight_sync = colocated(engine, "flattened", manifest_check="off", request_timeout_s=30)
    with pytest.raises(WeightSyncError, match=text):
        synced(weight_sync, [("a", torch.ones(60))], "flattened")


def test_a_dead_server_is_named_despite_earlier_failures():
    """A death ends the collective for the other engines as well."""
    session = SimpleNamespace(abort=lambda *_: None)
    reader = KnownEngineRank()
    requests = [failed_request(BAD), failed_request(LOST)]
    engines = [EngineRank("", session, request, reader) for request in requests]
    report = SyncReport(mode="disaggregated", replica=None)
    sessions = Sessions(TrainerRanks(), SETTINGS, report, engines)
    with pytest.raises(WeightSyncError) as raised:
        sessions.fail(EngineFailed("Connection reset by peer"), can_repeat=True)
    told = str(raised.value)
    assert told.index("Connection reset by peer") < told.index(str(LOST))
    assert str(BAD) not in told, "its session has told of that"


class Losing(Watched):
    """Loses a rank at the first call."""

    def _exchange(self, turn):
        super()._exchange(turn)
        raise RankLost("rank 2 did not answer")


class LosesLater(Watched):
    """Loses a rank when all engine ranks have loaded."""

    def _exchange(self, turn):
        if turn.same is not None:
            raise RankLost("rank 2 did not answer")
        return super()._exchange(turn)


def test_a_lost_rank_is_named_with_the_stage():
    report = SyncReport(mode="flattened", replica=0)
    sessions = Sessions(Losing([]), SETTINGS, report)
    with pytest.raises(RankLost, match="It happened in stage commit of the sync"):
        try:
            with report.stage("prove"), report.stage("commit"):
                raise IndexError
        except IndexError as error:
            sessions.fail(error, can_repeat=True)
    report.restart()
    assert report.failed_stage is None


def test_a_lost_ranks_stage_is_named_once():
    keys = {"bucket_bytes": 256, "manifest_check": "off", "request_timeout_s": 10}
    weight_sync = colocated(ServingEngine(), "compiled", LosesLater([]), **keys)
    with pytest.raises(RankLost) as lost:
        synced(weight_sync, [("first", torch.ones(60))])
    assert str(lost.value).count("It happened in stage") == 1


def test_a_rank_lost_between_sessions_has_its_stage(monkeypatch):
    weights = [("first", torch.arange(60.0))]
    engine = ServingEngine()
    engine.models = [ByName(weights)]
    keys = {"bucket_bytes": 256, "manifest_check": "off", "request_timeout_s": 10}
    weight_sync = colocated(engine, "compiled", prove_every_n_syncs=1, **keys)
    lost = Mock(side_effect=RankLost("rank 2 did not answer"))
    monkeypatch.setattr(weight_sync._route, "check_copies", lost)
    with pytest.raises(RankLost, match="It happened in stage prove of the sync"):
        synced(weight_sync, weights)


def test_nobody_is_asked_once_a_rank_is_lost():
    events = []
    sessions = Sessions(Losing(events), SETTINGS, SyncReport(mode="flattened", replica=0))
    with pytest.raises(RankLost, match=r"(?s)rank 2 did not answer.*IndexError"):
        sessions.fail(IndexError("list index out of range"), can_repeat=True)
    assert events == ["fails"]
