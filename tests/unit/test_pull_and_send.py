"""Which engine ranks of a disaggregated sync read in place, and which are sent to."""

from types import SimpleNamespace

import pytest
import torch

from sglang_loader.common.shared_memory import host_id
from support.settings import settings_of
from verl_sglang_sync.engine.arrangements import EngineArrangements
from verl_sglang_sync.ranks import TrainerRanks
from verl_sglang_sync.report import warn_once
from verl_sglang_sync.routes.pull.route import Pull
from verl_sglang_sync.routes.pull_and_send import PullAndSend
from verl_sglang_sync.routes.route import ExportedSync, RouteContext
from verl_sglang_sync.sources.export import Reexport

HERE = SimpleNamespace(host=host_id(), may_read_in_place=True)
PLANLESS = SimpleNamespace(host=host_id(), may_read_in_place=False)
AWAY = SimpleNamespace(host="another host", may_read_in_place=True)
CANNOT = "engine ranks cannot read the trainer's parameters in place: an engine"
NODE, PLAN = f"{CANNOT} is on another node", f"{CANNOT} has no load plan"
NONE = [False, False, False]
CASES = {
    "one replica is near": ([HERE, AWAY, AWAY], True, [True, False, False], {f"2 of 3 {NODE}"}),
    "a replica spans nodes": ([HERE, HERE, AWAY], True, [True, False, False], {f"2 of 3 {NODE}"}),
    "one has no plan": ([PLANLESS, HERE, AWAY], True, NONE, {f"1 of 3 {PLAN}", f"2 of 3 {NODE}"}),
    "none may read in place": ([HERE, AWAY, AWAY], False, NONE, {f"2 of 3 {NODE}"}),
}
"""How each rank of a TP 1 and a TP 2 replica has loaded, whether any may read in place, which do,
and what is logged.
"""


@pytest.mark.parametrize(("loaded", "may_pull", "near", "logged"), CASES.values(), ids=CASES)
def test_a_replica_pulls_if_all_its_ranks_can(loaded, may_pull, near, logged, caplog):
    readers = [EngineArrangements(is_wanted=True, replica=number) for number in (0, 1, 1)]
    settings = settings_of(
        "compiled", routes=["pull", "exchange"] if may_pull else ["exchange"]
    ).for_session()
    context = RouteContext(TrainerRanks(), torch.device("cpu"), settings, lambda: readers, 1)
    pull, weights = Pull(context, print), Reexport(list, sources=dict)
    warn_once.cache_clear()  # what other tests have logged
    sync = ExportedSync(weights, loaded, None)
    assert not pull.learn(sync)
    assert set(caplog.messages) == logged
    assert PullAndSend(context, pull, list)._near(sync) == near
    assert [reader.reads_in_place for reader in readers] == near


def test_an_export_is_compared_after_earlier_pulls():
    readers = [EngineArrangements(is_wanted=True)]
    context = RouteContext(
        TrainerRanks(), torch.device("cpu"), settings_of("compiled").for_session(), lambda: readers
    )
    pull, weights = Pull(context, print), Reexport(list, sources=dict)
    assert pull.wants_comparison(weights)
    for loaded in (PLANLESS, HERE, AWAY):
        pull.learn(ExportedSync(weights, [loaded], None))
        assert pull.wants_comparison(weights) == (loaded is HERE)
