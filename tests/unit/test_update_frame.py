"""A sync begins and ends SGLang's own update, where there is one (from 0.5.21 on), and obeys its
guards; what went wrong in it closes the gate. SGLang's steps are given, the rest is real.
"""

from types import SimpleNamespace

import msgspec
import pytest
import torch

from sglang_loader.hooks import weights
from sglang_loader.hooks.tp_ranks import TPRanks
from sglang_loader.hooks.weights import WeightUpdate
from sglang_loader.upstream import UpdateFrame

SHARED = "the weights are shared with the daemon"


class Session(msgspec.Struct, frozen=True):
    loaded_weights: bool = False


class Runner:
    """SGLang's model runner, and its weight updater, which notes what it is asked for."""

    def __init__(self, fails=""):
        self.model = torch.nn.Linear(1, 1)
        self.steps = []
        self.weight_updater = SimpleNamespace(
            begin_weight_update=lambda: self._note("begin", fails),
            end_weight_update=lambda run_post_load: self._note(f"end {run_post_load}", fails),
        )

    def _note(self, step, fails):
        self.steps.append(step)
        if fails and step.startswith(fails):
            raise RuntimeError(f"{step} failed")


def frame_of(*runners, session=None):
    return UpdateFrame(SimpleNamespace(_session=session), runners)


def test_all_models_are_begun_before_and_ended_after():
    runners = Runner(), Runner()
    frame = frame_of(*runners)
    frame.begin()
    assert frame.is_open
    frame.end()
    assert not frame.is_open
    assert [each.steps for each in runners] == [["begin", "end False"]] * 2


def test_a_session_that_the_client_has_begun_is_ended_by_the_client():
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
    def refuse(operation):
        raise RuntimeError(f"{operation}: {SHARED}")

    runners = Runner(), Runner()
    runners[1].weight_updater._assert_weight_cache_inactive = refuse
    frame = frame_of(*runners)
    with pytest.raises(RuntimeError, match=SHARED):
        frame.begin()
    assert not frame.is_open
    assert [each.steps for each in runners] == [[], []]


@pytest.fixture
def gate(monkeypatch):
    """What the gate was set to, in order."""
    found = []
    monkeypatch.setattr(weights, "set_gate", found.append)
    monkeypatch.setattr(TPRanks, "gather", lambda _, item: [item])
    monkeypatch.setattr(TPRanks, "rank", 0)
    return found


def sync(runner, load):
    """A sync that loads nothing: what went wrong, and which versions were recorded."""
    recorded = []
    updater = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner),
        draft_worker=None,
        _session=None,
        tp_cpu_group=None,
        offload_tags=set(),
        flush_cache=lambda empty_cache: True,
        record_weight_version_after_update=recorded.append,
    )
    request = SimpleNamespace(selector="all", torch_empty_cache=False, weight_version="7")
    return WeightUpdate(updater, request).run(load), recorded


def test_a_sync_loads_in_between_and_has_its_version_recorded(gate):
    runner = Runner()
    failures, recorded = sync(runner, lambda: runner.steps.append("load"))
    assert (failures, recorded) == ([], ["7"])
    assert runner.steps == ["begin", "load", "end False"]
    assert not gate, "nothing was loaded"


def test_a_load_that_fails_is_ended_and_has_no_version(gate):
    def load():
        raise ValueError("a bad tensor")

    runner = Runner()
    failures, recorded = sync(runner, load)
    assert "a bad tensor" in failures[0]
    assert (runner.steps, recorded) == (["begin", "end False"], [])


@pytest.mark.parametrize("step", ["begin", "end"])
def test_a_step_of_sglangs_that_fails_closes_the_gate(gate, step):
    failures, recorded = sync(Runner(fails=step), lambda: None)
    assert f"{step}" in failures[0]
    assert not recorded
    assert gate == ["the weights are not complete: the last sync was not complete"]
