"""Trainer ranks and an engine that restart: a saved plan is proven, and a wrong one traced anew."""

import os
import threading
from dataclasses import asdict
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sglang_loader.common.engine_settings import LOAD_PLANS_VARIABLE
from sglang_loader.common.session.messages import (
    MAKING_PLAN,
    PROVING_SAVED_PLAN,
)
from sglang_loader.load_plan.plan import LoadPlan
from sglang_loader.session import plan_store
from sglang_loader.session.kept_plan import CheckedPlan, HeldBytes, KeptPlan
from unit import route_ranks
from unit.route_ranks import TP, EngineModel, Rank, local_of

STEPS = ("sync", "step", "sync", "step", "sync")
SHARE = "verl_sglang_sync.routes.table.table_route.share_block"
LEFT_OUT = "model.layers.1.self_attn.o_proj.weight"


class ExchangedModel(EngineModel):
    """Two tensors of one shape have changed places."""

    def load_weights(self, weights):
        super().load_weights((_exchanged(name), tensor) for name, tensor in weights)

    def wrong(self, export):
        return super().wrong({_exchanged(name): tensor for name, tensor in export.items()})


def _exchanged(name):
    first, second = (f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1))
    return {first: second, second: first}.get(name, name)


class PartialModel(EngineModel):
    """A loader that leaves a tensor out."""

    def load_weights(self, weights):
        super().load_weights((name, tensor) for name, tensor in weights if name != LEFT_OUT)

    def wrong(self, export):
        return super().wrong({name: t for name, t in export.items() if name != LEFT_OUT})


class PaddedModel(EngineModel):
    """A model that has one tensor more."""


class RestartedRank(Rank):
    """A rank that notes, of each sync, why its engine replayed no plan."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._made_with = args, options
        self.reasons = []

    def sync(self):
        super().sync()
        self.reasons.append(self.seen.report.get("eager_reason"))

    def step(self):
        super().step()
        with torch.no_grad():  # no two tensors are alike
            for number, parameter in enumerate(self.model.parameters()):
                if (local := local_of(parameter)).numel():
                    local.view(-1)[0] += 1 + number + dist.get_rank() / 8

    def change_trainer(self):
        """Another trainer, of the first one's initial weights, and the same engine."""
        engine, seen, (args, options) = self.engine, self.seen, self._made_with
        models = engine.models if engine is not None else ()
        with mock.patch.object(route_ranks, "ServingEngine", lambda tp: engine):
            super().__init__(*args, **options)
        self.seen = seen
        if engine is not None:
            engine.models = models
        self.step()

    def forget_due_proof(self):
        """The proof that is due was made by another engine, while this one was away."""
        self.weight_sync._next_proof = None

    def load_by(self, kinds):
        """Load by other versions of the loader, of which the key of these tests has nothing.

        Args:
            kinds: of all TP ranks, or one of each.
        """
        kinds = kinds if isinstance(kinds, tuple) else (kinds,) * TP
        models = self.engine.models if self.engine is not None else ()
        for model, kind in zip(models, kinds, strict=False):
            model.__class__ = kind
            if kind is PaddedModel:
                model.register_buffer("padding", torch.ones(1))


def _key(model, context):
    return {"rank": str(model.rank)}


def _play_restarted(folder, wires, loaders, steps=STEPS, **settings):
    """What a rank sees before a restart, and after it, with a loader for each life."""
    lives = []
    variables = {LOAD_PLANS_VARIABLE: folder}
    with mock.patch.dict(os.environ, variables), mock.patch.object(plan_store, "plan_key", _key):
        for loader in loaders:
            rank = RestartedRank(wires, "moe", **settings)
            rank.load_by(loader)
            rank.step()
            for step in steps:
                name, *arguments = (step,) if isinstance(step, str) else step
                getattr(rank, name)(*arguments)
            for thread in threading.enumerate():
                if thread.name == "save-load-plan":
                    thread.join()
            lives.append((asdict(rank.seen), rank.reasons))
    return lives


@pytest.mark.parametrize("wires", ["pull", "exchange"])
def test_saved_plan_is_proven_after_a_restart(pool, tmp_path, wires):
    folder = tmp_path / "load-plans"
    lives = EngineModel, EngineModel
    for (before, traced), (after, saved) in pool.run(_play_restarted, str(folder), wires, lives):
        assert (traced[0], saved[0]) in ((MAKING_PLAN, PROVING_SAVED_PLAN), (None, None))
        for seen in (before, after):
            assert seen["errors"] == [] and not any(seen["wrong"])
            assert seen["routes"] == ["export", wires, wires]
            assert seen["state"] == "PROVEN"
        assert before["proven"] == [True, None, None]
        assert after["proven"] == [True, True, None], "another proof, with other weights"
    assert len(list(folder.iterdir())) == 2, "one of each TP rank"


def test_wrong_saved_plan_is_traced_in_its_sync(pool, tmp_path):
    folder = tmp_path / "load-plans"
    lives = EngineModel, ExchangedModel
    for (_, _), (after, reasons) in pool.run(_play_restarted, str(folder), "pull", lives):
        assert after["errors"] == [] and not any(after["wrong"])
        assert after["routes"] == ["export", "pull", "pull"]
        assert after["proven"] == [True, None, None] and after["state"] == "PROVEN"
        assert after["off"] is None
        assert reasons[0] in (MAKING_PLAN, None), "the export that follows is traced"
    assert len(list(folder.iterdir())) == 2, "the right plan has replaced it"


def test_after_an_unfit_saved_plan_all_is_traced(pool, tmp_path):
    """Though a training with on_fallback=error stops if a sync prepares no route for good."""
    folder = tmp_path / "load-plans"
    play = partial(_play_restarted, on_fallback="error")
    for (_, _), (after, reasons) in pool.run(play, str(folder), "pull", (EngineModel, PaddedModel)):
        assert after["errors"] == [] and not any(after["wrong"])
        assert after["routes"] == ["export", "export", "pull"]
        assert after["state"] == "PROVEN"
        assert reasons[0] is None or "saved load plan does not fit" in reasons[0]
        assert reasons[1] in (MAKING_PLAN, None)
    assert len(list(folder.iterdir())) == 2, "the new plan has replaced it"


def test_a_saved_plan_without_a_tensor_is_found(pool, tmp_path):
    """Its first proof is good, as the export has just brought that tensor."""
    lives = PartialModel, EngineModel
    for _, (after, _) in pool.run(_play_restarted, str(tmp_path / "plans"), "pull", lives):
        assert after["errors"] == [] and not any(after["wrong"])
        assert after["routes"] == ["export", "pull", "export"]
        assert after["proven"] == [True, False, None] and after["state"] == "OFF"
        assert LEFT_OUT in after["off"] or "held" in after["off"]


def test_a_saved_plan_with_too_much_is_found(pool, tmp_path):
    """Its proof overwrites what the loader leaves alone: nothing is served until a restart."""
    lives = EngineModel, PartialModel
    play = partial(_play_restarted, steps=("sync", "step", "sync"))
    for (before, _), (after, _) in pool.run(play, str(tmp_path / "plans"), "pull", lives):
        assert before["errors"] == [] and not after["routes"]
        assert all("Restart the engine" in error for error in after["errors"])
        assert all(LEFT_OUT in error for error in after["errors"]) and len(after["errors"]) == 2


def test_other_weights_must_cover_an_interrupted_proof():
    """Another sync follows, of whose plan is known what it writes, or which has none."""
    model = torch.nn.Linear(2, 2)
    kept = KeptPlan(model, load_weights=None)
    held = HeldBytes.of(model)

    def has_plan(*written):
        plan = LoadPlan((), {"weight": written}, held.destinations)
        kept.checked = CheckedPlan(plan, executor=None, probe=None)

    has_plan((0, 16))
    kept.begin_proof(held, "one sync")
    torch.nn.init.zeros_(model.weight)
    for has in (lambda: setattr(kept, "checked", None), lambda: has_plan((0, 8), (12, 16))):
        has()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"in weight. .* Restart the engine"):
                kept.check_restored("another")
    has_plan((0, 20))
    kept.check_restored("another")
    assert kept.begun_proof is None and not kept.lost


def test_unchanged_weights_prove_no_saved_plan(pool, tmp_path):
    """Two syncs of the same weights, as with a warm-up that begins at a learning rate of 0."""
    lives = PartialModel, EngineModel
    play = partial(_play_restarted, steps=("sync", "sync", "sync", "step", "sync"))
    for _, (after, _) in pool.run(play, str(tmp_path / "plans"), "pull", lives):
        assert after["errors"] == [] and not any(after["wrong"])
        assert after["routes"] == ["export", "pull", "pull", "pull"]
        assert after["proven"] == [True, True, True, False] and after["state"] == "OFF"


def test_another_trainer_is_served_no_gap(pool, tmp_path):
    """Its first sync is an export, which the saved plan would load without the tensor."""
    lives = PartialModel, EngineModel
    steps = ("sync", "change_trainer", "step", "sync", "step", "sync")
    play = partial(_play_restarted, steps=steps)
    for (before, _), (after, _) in pool.run(play, str(tmp_path / "plans"), "pull", lives):
        assert before["errors"] == after["errors"] == [] and not any(after["wrong"])
        assert after["routes"] == ["export", "export", "pull"]
        assert after["proven"] == [True, True, None] and after["state"] == "PROVEN"


def test_the_engine_remembers_a_due_proof(pool, tmp_path):
    lives = PartialModel, EngineModel
    play = partial(_play_restarted, steps=("sync", "forget_due_proof", "step", "sync"))
    for _, (after, _) in pool.run(play, str(tmp_path / "plans"), "pull", lives):
        assert after["errors"] == [] and not any(after["wrong"])
        assert after["routes"] == ["export", "pull"] and after["proven"] == [True, False]


def test_an_export_is_traced_until_more_proofs(pool, tmp_path):
    """The second sync, with the weights that would show it, is exported, as parameters are new."""
    lives = PartialModel, EngineModel
    steps = ("sync", "step", ("move", None, None, 1), "sync", "step", "sync")
    play = partial(_play_restarted, steps=steps)
    for _, (after, _) in pool.run(play, str(tmp_path / "plans"), "pull", lives):
        assert after["errors"] == [] and not any(after["wrong"])
        assert after["routes"] == ["export", "export", "pull"]
        assert after["proven"] == [True, True, None] and after["state"] == "PROVEN"


def test_an_export_in_a_proof_is_followed(pool, tmp_path):
    """The route's parameters are not located, so the saved plan loads the export, which is good."""
    lives = PartialModel, EngineModel
    no_room = "sync_failing", 1, SHARE, MemoryError("no room for handles")
    steps = (no_room, "step", "sync", "step", "sync")
    play = partial(_play_restarted, steps=steps)
    for _, (after, _) in pool.run(play, str(tmp_path / "plans"), "pull", lives):
        assert after["errors"] == [] and not any(after["wrong"])
        assert after["proven"][1] is True, "the next export is traced"


def test_a_tp_rank_trusts_no_plan_alone(pool, tmp_path):
    """The saved plan of TP rank 0 fails its proof, in which that of TP rank 1 seems to be good."""
    lives = (ExchangedModel, PartialModel), EngineModel
    for _, (after, _) in pool.run(_play_restarted, str(tmp_path / "plans"), "pull", lives):
        assert after["errors"] == [] and not any(after["wrong"])
        assert after["routes"] == ["export", "pull", "pull"]
        assert after["proven"] == [True, None, None] and after["state"] == "PROVEN"
