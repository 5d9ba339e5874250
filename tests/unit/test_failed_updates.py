"""What an update leaves on an engine's rank: one that failed, and how the next one mends it; and
that each begins and ends SGLang's own, where there is one (from 0.5.21 on), and obeys its guards.
"""

from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
import torch

from sglang_loader.hooks import request_gate, weights
from sglang_loader.hooks.tp_ranks import TPRanks
from sglang_loader.host_backup.backup import create_backup
from sglang_loader.load_plan.executor import PlanExecutor
from sglang_loader.session.findings import Verdict
from sglang_loader.session.model_loader import loader_of
from sglang_loader.upstream import UpdateFrame
from support.reachable_memory import reachable
from unit.released_memory import poison
from unit.test_model_loader import (
    NAMES,
    Model,
    check_loaded,
    layouts_of,
    move_a_parameter,
    sync,
)

NOT_INVITED = Mock(side_effect=ValueError("not an invitation"))


class Runner:
    """SGLang's model runner, and its weight updater, which notes what it is asked for, and fails at
    the step that begins so.
    """

    def __init__(self, model=None):
        self.model, self.steps, self.fails = model, [], ""
        self.weight_updater = SimpleNamespace(
            begin_weight_update=lambda: self._note("begin"),
            end_weight_update=lambda run_post_load: self._note(f"end {run_post_load}"),
        )

    def _note(self, step):
        self.steps.append(step)
        if self.fails and step.startswith(self.fails):
            raise RuntimeError(f"{step} failed")


class Engine:
    """One TP rank with the real backup, loader and update; what the others say is given.

    Attributes:
        others: of each other rank, what failed, whether it has overwritten weights, and whether the
            set of tensors is new to it.
        undefined: what a complete sync leaves undefined on these.
        differing: what a proof has found on these.
        verdict: on every set of tensors.
        known: what is remembered of it.
        num_looked_at: sets of tensors that were looked at.
        gate: what the gate was set to, in order.
        is_busy: requests are running.
        num_flushes: of the prefix cache.
        recorded: versions that SGLang was told.
    """

    def __init__(self):
        self.model = Model()
        self.backup = create_backup(self.model, "auto", reachable)
        self.loader = loader_of(self.model)
        self.others, self.undefined, self.differing = [], None, []
        self.verdict = Verdict()
        self.known = None
        self.num_looked_at = 0
        self.gate = []
        self.is_busy = False
        self.num_flushes = 0
        self.runner, self.recorded = Runner(self.model), []
        self._updater = SimpleNamespace(
            tp_worker=SimpleNamespace(model_runner=self.runner),
            draft_worker=None,
            _session=None,
            record_weight_version_after_update=self.recorded.append,
            flush_cache=self._flush,
            offload_tags=set(),
            tp_cpu_group=None,
        )

    def session(self, value, *, names=NAMES, fails=None, check="off", is_last=True):
        """As `_serve_session`, without the socket; `fails` once loading has begun."""

        def load(update):
            update.manifest_check = check
            update.flush()
            for layout in layouts_of(names):
                update.begin_bucket(layout)
                if fails is not None:
                    raise RuntimeError(fails)
            sync(self.loader, value, layouts=layouts_of(names))

        return self.update(load, is_last)

    def update(self, load, is_last=True):
        request = SimpleNamespace(torch_empty_cache=False, weight_version="7")
        self.last = weights.WeightUpdate(self._updater, request)
        return self.last.run(lambda: load(self.last), lambda: is_last, lambda failure: None)

    def look_at(self, *_):
        self.num_looked_at += 1
        return "a view"

    def sleep_and_wake(self):
        self.backup.save(self.model)
        poison(self.model)
        self.backup.restore()

    def _flush(self, *, empty_cache):
        self.num_flushes += not self.is_busy
        return not self.is_busy


@pytest.fixture
def engine(monkeypatch):
    engine = Engine()

    def from_all(_, item):
        if isinstance(item, tuple):
            others = (
                (*other, engine.undefined, engine.differing, "other") for other in engine.others
            )
            return [item, *others]
        return [item, *(text for text, _, _ in engine.others)]

    monkeypatch.setattr(weights, "cached_verdict", lambda *_: engine.known)
    monkeypatch.setattr(weights, "view_of_sync", engine.look_at)
    monkeypatch.setattr(weights, "judge_together", lambda *_: engine.verdict)

    monkeypatch.setattr(TPRanks, "gather", from_all)
    monkeypatch.setattr(TPRanks, "rank", 0)
    monkeypatch.setattr(weights, "set_gate", engine.gate.append)
    assert engine.session(1.0) == []
    engine.sleep_and_wake()
    assert engine.session(2.0) == []
    return engine


def test_after_a_failure_the_same_plan_proves(engine):
    engine.sleep_and_wake()
    host_bytes = engine.backup.host_bytes
    [failure] = engine.session(3.0, fails="the trainer aborted")
    assert "the trainer aborted" in failure
    assert "the weights are not complete" in str(engine.gate[-1])
    assert engine.session(4.0) == []
    check_loaded(engine.model, 4.0)
    assert engine.gate[-1] is None
    engine.sleep_and_wake()
    assert engine.backup.host_bytes == host_bytes, "only the residue is saved, as before"
    assert engine.session(5.0) == []


def test_a_session_that_running_requests_refuse_changes_nothing(engine):
    engine.is_busy, gate = True, list(engine.gate)
    [failure] = engine.session(3.0)
    assert "the prefix cache cannot be dropped: requests are running" in failure
    check_loaded(engine.model, 2.0)
    assert engine.backup.stale is None
    assert engine.gate == gate
    engine.is_busy = False
    engine.backup.save(engine.model)
    assert engine.backup.host_bytes < sum(p.nbytes for p in engine.model.parameters())


def test_a_rank_behind_the_others_is_stale(engine):
    engine.others = [("TP rank 1: no memory", True, False)]

    mine, theirs = engine.update(NOT_INVITED)
    assert "not an invitation" in mine
    assert theirs == "TP rank 1: no memory"
    assert engine.backup.stale == "the last sync was not complete"
    assert engine.gate[-1] is not None


def test_a_shorter_sync_leaves_other_buckets_undefined(engine):
    assert engine.session(2.0) == []
    engine.sleep_and_wake()
    [failure] = engine.session(3.0, names=FEWER)
    assert "are undefined since the last resume" in failure
    assert "are undefined since the last resume" in str(engine.gate[-1])
    assert engine.session(4.0) == []
    assert engine.gate[-1] is None
    check_loaded(engine.model, 4.0)


def test_memory_left_by_the_model_is_not_missed(engine):
    engine.sleep_and_wake()
    move_a_parameter(engine.model)
    [failure] = engine.session(3.0)
    assert "32 bytes of the weights are undefined" in failure
    engine.sleep_and_wake()
    assert engine.session(4.0) == []
    assert engine.gate[-1] is None
    check_loaded(engine.model, 4.0)


def test_undefined_bytes_of_another_rank_stop_serving(engine):
    engine.others, engine.undefined = [(None, True, False)], "TP rank 1: 8 bytes are undefined"
    assert engine.session(3.0) == [engine.undefined]
    assert engine.gate[-1] == "the weights are not complete: the last sync was not complete"
    engine.undefined = None
    assert engine.session(4.0) == []
    assert engine.gate[-1] is None


@pytest.mark.parametrize("proof", ("served", "route"))
@pytest.mark.parametrize("differing", ([], ["a", "b"]))
def test_the_reply_has_every_ranks_proof(engine, proof, differing):
    def load(update):
        update.proof, update.differing = proof, differing[:1]
        sync(engine.loader, 1.0)

    engine.others, engine.differing = [(None, True, False)], differing
    assert engine.update(load) == []
    assert engine.last.proof_fact == {"proof": proof, "differing": differing}
    engine.others = [("no memory", True, False)]
    assert engine.update(load) != []
    found = {"proof": proof, "differing": differing} if differing else None
    assert engine.last.proof_fact == found, "a session that failed proves nothing more"
    engine.others = []
    engine.session(2.0)
    assert engine.last.proof_fact is None


def test_the_prefix_cache_is_dropped_once_whatever_happens(engine):
    for fails in (None, "half way"):
        before = engine.num_flushes
        engine.session(3.0, fails=fails)
        assert engine.num_flushes == before + 1
    before = engine.num_flushes
    engine.update(NOT_INVITED)
    assert engine.num_flushes == before + 1, "other TP ranks may have come to it"


FEWER = ("a", "b")
VERDICTS = {
    "proven": (Verdict(), None),
    "missing": (Verdict(missing=("c",)), "1 missing: c"),
    "not checked": (Verdict(not_checked="quantised"), "earlier syncs also brought c, d"),
    "doubtful": (Verdict(doubtful=("c",)), "earlier syncs also brought c, d"),
}


@pytest.mark.parametrize(("verdict", "reason"), VERDICTS.values(), ids=VERDICTS.keys())
def test_after_a_failure_fewer_tensors_need_proof(engine, verdict, reason):
    engine.verdict = verdict
    assert engine.session(3.0, names=FEWER) == [], "nothing has failed yet"
    engine.session(4.0, fails="half way")
    failures = engine.session(5.0, names=FEWER)
    assert [reason in text for text in failures] == ([] if reason is None else [True])
    assert (engine.gate[-1] is None) == (reason is None)
    assert engine.session(6.0) == [], "all that ever came"
    assert engine.gate[-1] is None


def test_a_sync_after_a_failed_first_is_checked(engine):
    engine.backup = create_backup(engine.model, "auto", reachable)
    engine.session(1.0, fails="half way")
    engine.verdict = Verdict(missing=("e",))
    [failure] = engine.session(2.0)
    assert "after a failed sync nothing is published" in failure
    assert "1 missing: e" in failure
    engine.verdict = Verdict()
    assert engine.session(3.0) == []


def test_tensors_new_to_one_rank_all_check(engine):
    engine.others = [(None, True, False)]
    assert engine.session(3.0) == []
    assert not engine.num_looked_at
    engine.others = [(None, True, True)]
    assert engine.session(4.0) == []
    assert engine.num_looked_at == 1


MISFIT = Verdict(mismatched=("a [2] (too long)",), missing=("e",), unexpected=("f", "g"))
FITS, UNCHECKED = Verdict(), Verdict(not_checked="a quantised model")
REFUSED = "nothing is published"
CHECKS = {  # the verdict, what is known, the setting; what is said, and how often all is looked at
    "refused": (MISFIT, None, "error", REFUSED, 1),
    "refused before": (MISFIT, MISFIT, "error", REFUSED, 1),
    "refused before, for another rank's tensors": (FITS, MISFIT, "error", "", 1),
    "not checked": (UNCHECKED, None, "error", "not checked: a quantised model", 1),
    "fits": (FITS, None, "error", "", 1),
    "known to fit": (MISFIT, FITS, "error", "", 0),
    "off": (MISFIT, None, "off", "", 0),
}


@pytest.mark.parametrize(
    ("verdict", "known", "check", "said", "num_looked_at"), CHECKS.values(), ids=CHECKS
)
def test_unfit_tensors_are_named_and_not_published(
    engine, verdict, known, check, said, num_looked_at
):
    engine.verdict, engine.known = verdict, known
    failures = engine.session(3.0, check=check)
    assert engine.num_looked_at == num_looked_at
    if said != REFUSED:
        assert failures == [] and engine.gate[-1] is None
        assert said in " ".join(engine.last.remarks) and bool(said) == bool(engine.last.remarks)
        return
    [failure] = failures
    for part in ("1 mismatched: a [2] (too long)", "1 missing: e", "2 unexpected: f, g", REFUSED):
        assert part in failure
    assert engine.gate[-1] is not None
    engine.verdict, engine.known = FITS, None
    assert engine.session(4.0, check="error") == []
    assert engine.gate[-1] is None


def test_a_reply_reports_a_broken_kernel(engine, monkeypatch):
    monkeypatch.setattr(weights, "fallbacks", ["torch copies weights, slower"])
    assert engine.session(3.0) == []
    assert engine.last.remarks == ["in the engine torch copies weights, slower"]


def test_no_request_runs_between_a_syncs_sessions(engine):
    assert engine.session(3.0, is_last=False) == []
    assert engine.gate[-1] == request_gate.ANOTHER_SESSION
    assert engine.backup.stale is None, "what it brought is complete"
    assert engine.session(3.0) == []
    assert engine.gate[-1] is None


def test_weights_overwritten_by_a_proof_are_not_served(engine):
    def poisoned(update):
        update.begin_writing()
        raise RuntimeError("the proof failed")

    [failure] = engine.update(poisoned)
    assert "the proof failed" in failure
    assert "the weights are not complete" in str(engine.gate[-1])
    assert engine.session(4.0) == []
    assert engine.gate[-1] is None


def test_a_replay_that_fails_midway_leaves_defined_weights(engine, monkeypatch):
    """`load_weights` has written what the plan would have, so nothing is undefined after it."""
    engine.sleep_and_wake()
    replay = PlanExecutor.replay

    def fails_once(executor, index, *arguments):
        if index == 1:
            raise torch.OutOfMemoryError("no memory")
        replay(executor, index, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(PlanExecutor, "replay", fails_once)
        assert engine.session(3.0) == []
    check_loaded(engine.model, 3.0)
    assert engine.gate[-1] is None and engine.backup.stale is None
    assert engine.loader.plan is None
    engine.sleep_and_wake()
    assert engine.session(4.0) == [], "all was saved, and another plan is made"
    check_loaded(engine.model, 4.0)
    assert engine.loader.plan is not None


# SGLang's own update.


def test_all_models_are_begun_before_and_ended_after():
    runners = Runner(), Runner()
    frame = UpdateFrame(SimpleNamespace(_session=None), runners)
    frame.begin()
    assert frame.is_open
    frame.end()
    assert not frame.is_open
    assert [each.steps for each in runners] == [["begin", "end False"]] * 2


class Session(msgspec.Struct, frozen=True):
    loaded_weights: bool = False


def test_a_clients_session_is_ended_by_the_client():
    runner, updater = Runner(), SimpleNamespace(_session=Session())
    frame = UpdateFrame(updater, [runner])
    frame.begin()
    frame.end()
    assert not runner.steps
    assert updater._session.loaded_weights, "SGLang must not derive anything anew"
    frame = UpdateFrame(SimpleNamespace(), [SimpleNamespace(model=None)])  # an older release's
    frame.begin()
    frame.end()
    assert not frame.is_open


def test_sglangs_guard_keeps_every_model_as_it_is():
    refuse = Mock(side_effect=RuntimeError("the weights are shared with the daemon"))
    runners = Runner(), Runner()
    runners[1].weight_updater._assert_weight_cache_inactive = refuse
    frame = UpdateFrame(SimpleNamespace(_session=None), runners)
    with pytest.raises(RuntimeError, match="shared with the daemon"):
        frame.begin()
    assert not frame.is_open
    assert [each.steps for each in runners] == [[], []]


@pytest.mark.parametrize("fails", ["", "load", "begin", "end"])
def test_a_good_syncs_version_is_recorded(engine, fails):
    runner = engine.runner
    for found in (runner.steps, engine.recorded, engine.gate):
        found.clear()
    runner.fails = fails
    failures = engine.update(lambda _: runner._note("load"))
    assert [f"{fails}" in text for text in failures] == [True] * bool(fails)
    assert engine.recorded == ([] if fails else ["7"])
    steps = ["begin", "load", "end False"]
    assert runner.steps == (steps[:1] if fails == "begin" else steps)
    is_doubtful = fails in ("begin", "end")  # else nothing was loaded, and all is as it was
    incomplete = "the weights are not complete: the last sync was not complete"
    assert engine.gate == [incomplete] * is_doubtful
