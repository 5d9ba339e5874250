"""Trainer ranks and an engine that restart: a saved plan is proven, and a wrong one traced anew."""

import os
import threading
from dataclasses import asdict
from unittest import mock

import pytest

from sglang_loader.common.engine_settings import LOAD_PLANS_VARIABLE
from sglang_loader.common.session.messages import MAKING_PLAN, PROVING_SAVED_PLAN
from sglang_loader.session import plan_store
from unit.route_ranks import EngineModel, Rank

STEPS = ("sync", "step", "sync", "step", "sync")


class ExchangedModel(EngineModel):
    """Two tensors of one shape have changed places."""

    def load_weights(self, weights):
        super().load_weights((_exchanged(name), tensor) for name, tensor in weights)

    def wrong(self, export):
        return super().wrong({_exchanged(name): tensor for name, tensor in export.items()})


def _exchanged(name):
    first, second = (f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1))
    return {first: second, second: first}.get(name, name)


class RestartedRank(Rank):
    """A rank that notes, of each sync, why its engine replayed no plan."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.reasons = []

    def sync(self):
        super().sync()
        self.reasons.append(self.seen.report["eager_reason"])

    def exchange_targets(self):
        """Load by another version of the loader, of which the key of these tests has nothing."""
        for model in self.engine.models if self.engine is not None else ():
            model.__class__ = ExchangedModel


def _key(model, context):
    return {"rank": str(model.rank)}


def _play_restarted(folder, wires, plant):
    """What a rank sees before a restart, and after it."""
    lives = []
    variables = {LOAD_PLANS_VARIABLE: folder}
    with mock.patch.dict(os.environ, variables), mock.patch.object(plan_store, "plan_key", _key):
        for is_restarted in (False, True):
            rank = RestartedRank(wires, "moe")
            if is_restarted and plant:
                rank.exchange_targets()
            rank.step()
            for step in STEPS:
                getattr(rank, step)()
            for thread in threading.enumerate():
                if thread.name == "save-load-plan":
                    thread.join()
            lives.append((asdict(rank.seen), rank.reasons))
    return lives


@pytest.mark.parametrize("wires", ["pull", "exchange"])
def test_saved_plan_is_proven_after_a_restart(pool, tmp_path, wires):
    folder = tmp_path / "load-plans"
    for (before, traced), (after, saved) in pool.run(_play_restarted, str(folder), wires, False):
        assert (traced[0], saved[0]) in ((MAKING_PLAN, PROVING_SAVED_PLAN), (None, None))
        for seen in (before, after):
            assert seen["errors"] == [] and not any(seen["wrong"])
            assert seen["routes"] == ["export", wires, wires]
            assert seen["proven"] == [True, True, None], "norms that are alike need another proof"
            assert seen["state"] == "PROVEN"
    assert len(list(folder.iterdir())) == 2, "one of each TP rank"


def test_wrong_saved_plan_is_traced_in_its_sync(pool, tmp_path):
    folder = tmp_path / "load-plans"
    for (_, _), (after, reasons) in pool.run(_play_restarted, str(folder), "pull", True):
        assert after["errors"] == [] and not any(after["wrong"])
        assert after["routes"] == ["export", "pull", "pull"]
        assert after["proven"] == [True, True, None] and after["state"] == "PROVEN"
        assert after["off"] is None
        assert reasons[0] in (MAKING_PLAN, None), "the export that follows is traced"
    assert len(list(folder.iterdir())) == 2, "the right plan has replaced it"
