"""A saved plan is the plan that was saved, on a model of other addresses; any other is refused."""

import os
import threading
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import nn

import sglang_loader.session.plan_store as plan_store
from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.engine_settings import LOAD_PLANS_VARIABLE
from sglang_loader.common.layout import BucketLayout, decode_layout, encode_layout
from sglang_loader.session.model_loader import ModelLoader
from sglang_loader.session.proof import HeldWeights, SessionProof
from support.random_loaders import PARTS, Model, buckets_of, lose_what_is_covered, steps_of

NUM_LOADERS = 200


class Cast(nn.Module):
    """Two fused parts, one of which is cast."""

    def __init__(self, size=8):
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(size, 4), requires_grad=False)
        self.cast = nn.Parameter(torch.zeros(size, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            half = len(self.fused) // 2
            if name == "cast":
                self.cast.data.copy_(tensor)
            else:
                self.fused.data[:half].copy_(tensor) if name == "up" else self.fused.data[
                    half:
                ].copy_(tensor)


def sync_of(size=8, seed=0):
    """The buckets of a sync, filled at random."""
    half = (size // 2, 4)
    specs = [[("up", half), ("down", half)], [("cast", (size,))]]
    generator = torch.Generator().manual_seed(seed)
    return [
        filled(BucketLayout.pack((*spec, torch.float32) for spec in each), generator)
        for each in specs
    ]


def filled(layout, generator):
    values = torch.randint(1, 99, (layout.nbytes // 4,), generator=generator)
    return layout, values.to(torch.float32).view(torch.uint8)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(LOAD_PLANS_VARIABLE, str(tmp_path / "load-plans"))
    monkeypatch.setattr(plan_store, "plan_key", key_of)
    return tmp_path / "load-plans"


def key_of(model, context):
    return {"model": type(model).__name__, **context}


def load(loader, buckets, context=None, **start):
    """One sync of a loader, and its outcome."""
    context = context or {}
    loader.start(context, keeps_plans=True, **start)
    for index, (layout, buffer) in enumerate(buckets):
        loader.load(index, layout, BucketSource.flat(buffer))
    return loader.finish()


def prove(loader, buckets, context=None):
    """What differs after the proof of a route that sends the same once more."""
    held = HeldWeights.of([loader])
    held.poison()
    load(loader, buckets, context, proves_route=True)
    return held.differing()


def save(model, buckets, context=None):
    """Trace and prove the plan of a model, which saves it."""
    loader = ModelLoader(model)
    load(loader, buckets, context)
    assert loader.plan is not None and not loader.kept.is_unproven
    assert prove(loader, buckets, context) == []
    loader.kept.trust()
    await_saved()
    return loader.plan


def await_saved():
    for thread in threading.enumerate():
        if thread.name == "save-load-plan":
            thread.join()


def test_restarted_loader_uses_the_saved_plan():
    buckets = sync_of()
    plan = save(Cast(), buckets)
    loader = ModelLoader(Cast())
    load(loader, buckets)
    assert loader.kept.is_unproven
    assert loader.plan.buckets == tuple(
        replace(b, left_out=(), recomputed=frozenset(), host_reads=()) for b in plan.buckets
    )
    assert loader.plan.coverage == plan.coverage
    assert prove(loader, buckets) == []
    loader.kept.trust()
    new = sync_of(seed=1)
    outcome = load(loader, new)
    assert outcome.num_replayed == len(new) and outcome.reason is None
    eager = Cast()
    for layout, buffer in new:
        eager.load_weights(iter(layout.views(buffer)))
    assert torch.equal(loader.model.fused, eager.fused)
    assert torch.equal(loader.model.cast, eager.cast)


def test_saved_plan_has_the_layouts_of_messages():
    """Equal ones are compared tensor by tensor in each sync, which costs milliseconds for 30 B."""
    buckets = [(decode_layout(encode_layout(layout)), buffer) for layout, buffer in sync_of()]
    save(Cast(), buckets)
    loader = ModelLoader(Cast())
    load(loader, buckets)
    for (layout, _), planned, uses in zip(buckets, loader.plan.buckets, loader.uses, strict=True):
        assert planned.layout is layout and uses.layout is layout


def test_first_sync_with_saved_plan_is_not_traced(monkeypatch):
    buckets = sync_of()
    save(Cast(), buckets)
    loader = ModelLoader(Cast())
    monkeypatch.setattr("sglang_loader.session.recording.trace_bucket", None)
    load(loader, buckets)
    assert loader.kept.is_unproven


def test_uses_of_a_saved_plan_are_those_traced():
    buckets = sync_of()
    traced = ModelLoader(Cast())
    load(traced, buckets)
    save(Cast(), buckets)
    loader = ModelLoader(Cast())
    load(loader, buckets)
    assert loader.kept.is_unproven
    assert loader.uses == traced.uses


def test_unproven_saved_plan_loads_no_later_sync():
    buckets = sync_of()
    save(Cast(), buckets)
    loader = ModelLoader(Cast())
    load(loader, buckets)
    assert load(loader, buckets).num_replayed == 0
    assert loader.plan is not None and not loader.kept.is_unproven, "traced now"


@pytest.mark.parametrize("context", [{"model": "other"}, {"sglang": "0.6"}, {"ranks": "2"}])
def test_plan_of_another_key_is_not_used(context):
    buckets = sync_of()
    save(Cast(), buckets)
    loader = ModelLoader(Cast())
    load(loader, buckets, context)
    assert loader.plan is not None and not loader.kept.is_unproven
    assert loader.kept.take_remarks() == []


def test_plan_of_other_buckets_is_not_used():
    buckets = sync_of()
    save(Cast(), buckets)
    generator = torch.Generator().manual_seed(3)
    other = [buckets[0], filled(BucketLayout.pack([("cast", (4, 2), torch.float32)]), generator)]
    loader = ModelLoader(Cast())
    loader.model.cast = nn.Parameter(torch.zeros(4, 2), requires_grad=False)
    assert "other tensors" in load(loader, other).reason
    assert loader.plan is None
    assert all(uses.problem for uses in loader.uses), "the manifest check must not judge by these"
    load(loader, other)
    assert loader.plan is not None and not loader.kept.is_unproven


def test_plan_of_other_destinations_is_not_used():
    buckets = sync_of()
    save(Cast(), buckets)
    model = Cast()
    model.cast = nn.Parameter(torch.zeros(8), requires_grad=False)  # float32
    loader = ModelLoader(model)
    load(loader, buckets)
    assert loader.plan is None
    load(loader, buckets)
    assert loader.plan is not None and not loader.kept.is_unproven


def test_key_that_cannot_be_made_costs_one_trace(monkeypatch):
    def fails(model, context):
        raise TypeError("a configuration of no known kind")

    monkeypatch.setattr(plan_store, "plan_key", fails)
    loader = ModelLoader(Cast())
    load(loader, sync_of())
    assert loader.plan is not None and not loader.kept.is_unproven
    [remark] = loader.kept.take_remarks()
    assert "no known kind" in remark


def damage(kind, path):
    content = path.read_bytes()
    if kind == "cut":
        path.write_bytes(content[:-1])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "changed":
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif kind == "writable by others":
        path.chmod(0o666)
    elif kind == "folder of others":
        path.parent.chmod(0o777)
    elif kind == "a link":
        path.rename(path.parent.parent / "moved")
        path.symlink_to(path.parent.parent / "moved")
    elif kind == "a pipe":
        path.unlink()
        os.mkfifo(path, 0o600)
    elif kind == "no plan":
        from sglang_loader.common.private_files import write_private

        write_private(path, b"\x80")


DAMAGES = (
    *("cut", "empty", "changed", "writable by others", "folder of others"),
    *("a link", "a pipe", "no plan"),
)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_file_is_refused_with_one_warning(kind, folder, caplog):
    buckets = sync_of()
    save(Cast(), buckets)
    [path] = folder.iterdir()
    damage(kind, path)
    loader = ModelLoader(Cast())
    load(loader, buckets)
    assert loader.plan is not None and not loader.kept.is_unproven
    [remark] = loader.kept.take_remarks()
    assert "not used" in remark
    assert sum("not used" in record.message for record in caplog.records) == 1


def test_file_of_another_user_is_refused(folder, monkeypatch):
    buckets = sync_of()
    save(Cast(), buckets)
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    loader = ModelLoader(Cast())
    load(loader, buckets)
    assert not loader.kept.is_unproven
    assert "belongs to user" in loader.kept.take_remarks()[0]


def test_saved_files_are_private_and_few(folder, monkeypatch):
    monkeypatch.setattr(plan_store, "MAX_FILES", 2)
    for size in (8, 16, 32):
        save(Cast(size), sync_of(size))
    assert len(list(folder.iterdir())) == 2
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_nothing_is_saved_if_switched_off(folder, monkeypatch):
    monkeypatch.setenv(LOAD_PLANS_VARIABLE, "")
    save(Cast(), sync_of())
    assert not folder.exists()


class Swapped(Cast):
    """Loads the two halves the other way round, which the key of these tests does not see."""

    def load_weights(self, weights):
        swapped = {"up": "down", "down": "up"}
        super().load_weights((swapped.get(name, name), tensor) for name, tensor in weights)


def test_wrong_saved_plan_fails_its_proof(folder, monkeypatch):
    monkeypatch.setattr(plan_store, "plan_key", lambda model, context: {})
    buckets = sync_of()
    save(Cast(), buckets)
    loader = ModelLoader(Swapped())
    load(loader, buckets)
    assert loader.kept.is_unproven
    assert prove(loader, buckets) == ["fused"]
    loader.kept.doubt("its proof failed")
    assert list(folder.iterdir()) == [], "a restart would fail likewise"
    load(loader, buckets)
    assert loader.plan is not None and not loader.kept.is_unproven, "traced"
    assert prove(loader, buckets) == []


class WithTable(Cast):
    """Has a table that is not loaded, and that a wrong plan writes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(4))


@pytest.mark.parametrize("is_wrong", [False, True])
def test_an_interrupted_proof_spoils_no_later_sync(is_wrong, folder):
    buckets = sync_of()
    save(WithTable(), buckets)
    loader = ModelLoader(WithTable())
    load(loader, buckets)
    if is_wrong:
        plan = replace(loader.plan, coverage={**loader.plan.coverage, "table": ((4, 8),)})
        loader.kept.checked = replace(loader.kept.checked, plan=plan)
    SessionProof("route", [loader], "a trainer that dies").begin(lambda: None)
    for seed in (1, 2):
        load(loader, sync_of(seed=seed))
        if not is_wrong:
            loader.kept.check_restored("another trainer")
            continue
        with pytest.raises(RuntimeError, match=r"in table. .* Restart the engine"):
            loader.kept.check_restored("another trainer")
    assert len(list(folder.iterdir())) == (not is_wrong), "a restart would try it again"


def test_refuted_plan_is_not_kept(folder):
    buckets = sync_of()
    loader = ModelLoader(Cast())
    load(loader, buckets)
    assert prove(loader, buckets) == []
    loader.kept.trust()
    await_saved()
    assert len(list(folder.iterdir())) == 1
    loader.kept.distrust("a proof found other bytes than the export has")
    assert list(folder.iterdir()) == []


def first_difference(seed):
    """Save the plan of a random loader, restart, prove, lose what is covered, and sync on."""
    random = Random(seed)
    names = [f"t{number}" for number in range(random.randint(2, 4))]
    steps, layouts = steps_of(random, names), buckets_of(random, names)
    generator = torch.Generator().manual_seed(seed)
    first = [filled(layout, generator) for layout in layouts]
    saving = ModelLoader(Model(steps))
    load(saving, first)
    if saving.plan is None or prove(saving, first):  # the loader reads its old content
        return None
    saving.kept.trust()
    await_saved()
    loader = ModelLoader(Model(steps))
    load(loader, first)
    if not loader.kept.is_unproven:
        return f"seed {seed}: the saved plan is not used"
    if prove(loader, first):
        return f"seed {seed}: the saved plan fails its proof"
    loader.kept.trust()
    eager = Model(steps)
    eager.load_state_dict(loader.model.state_dict())
    for number in range(3):
        buckets = [filled(layout, generator) for layout in layouts]
        lose_what_is_covered(loader.plan)
        load(loader, buckets)
        for layout, buffer in buckets:
            eager.load_weights(iter(layout.views(buffer.clone())))
        for name in PARTS:
            if not torch.equal(getattr(loader.model, name), getattr(eager, name)):
                return f"seed {seed}, sync {number}: {name} differs"
    return ""


def test_random_loaders_go_on_as_before_restart(monkeypatch):
    monkeypatch.setattr(plan_store, "plan_key", lambda model, context: {"steps": repr(model.steps)})
    found = [first_difference(seed) for seed in range(NUM_LOADERS)]
    assert list(filter(None, found)) == []
    assert found.count("") > NUM_LOADERS / 5, "most plans are refused: little is proved"
