"""One model's syncs: recorded, replayed, and eager again wherever the plan does not hold."""

import logging
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import nn

from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.session.messages import SessionError
from sglang_loader.load_plan.rounds import CUT_BYTES
from sglang_loader.session.kept_plan import MAX_RECORDINGS, MAX_SYNCS_APART
from sglang_loader.session.model_loader import loader_of
from support.scattered import Scattered

CONTEXT = {"tp_rank": 0, "expert_map": bytes(4)}
NAMES = ("a", "b", "c", "d")


class Model(nn.Module):
    """Fuses two tensors into one parameter and copies the others; counts eager calls."""

    def __init__(self):
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(2, 8), requires_grad=False)
        self.c = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.d = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.calls = 0

    def load_weights(self, weights):
        self.calls += 1
        for name, tensor in weights:
            target = self.fused[NAMES.index(name)] if name in "ab" else getattr(self, name)
            target.copy_(tensor)


class AddsToItsSources(Model):
    def load_weights(self, weights):
        super().load_weights((name, tensor.add_(1)) for name, tensor in weights)


class Waits(Model):
    """Loads "a" when "c" comes, in whichever call, as SGLang's nvfp4_online loads pairs."""

    def __init__(self):
        super().__init__()
        waiting = {}

        def load_weights(weights):
            for name, tensor in weights:
                if name == "a":
                    waiting["a"] = tensor
                    continue
                if name == "c":
                    Model.load_weights(self, [("a", waiting.pop("a"))])
                Model.load_weights(self, [(name, tensor)])

        self.load_weights = load_weights


class Rebinds(Model):
    def load_weights(self, weights):
        super().load_weights(weights)
        self.c = nn.Parameter(self.c.clone(), requires_grad=False)


class Overlaps(Model):
    """Two storages have the same memory."""

    def __init__(self):
        super().__init__()
        self.c = nn.Parameter(torch.zeros(16)[8:], requires_grad=False)
        self.other = torch.from_numpy(self.c.numpy())


def layouts_of(names=NAMES, width=8):
    """Two tensors to a bucket."""
    pairs = (names[i : i + 2] for i in range(0, len(names), 2))
    return [BucketLayout.pack([(n, (width,), torch.float32) for n in pair]) for pair in pairs]


def bucket_of(layout, value):
    """Each tensor counts from `value` on."""
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for _, view in layout.views(buffer):
        view.copy_(torch.arange(view.numel()) + value)
    return buffer


def sync(loader, value, *, layouts=None, context=CONTEXT, is_eager=False):
    """By whole buckets, which stay as they are; returns the outcome."""
    loader.start(context, is_eager=is_eager)
    for index, layout in enumerate(layouts_of() if layouts is None else layouts):
        buffer = bucket_of(layout, value)
        before = buffer.clone()
        loader.load(index, layout, BucketSource.flat(buffer))
        assert torch.equal(buffer, before)
    return loader.finish()


def check_loaded(model, value):
    for tensor in (*model.fused, model.c, model.d):
        assert torch.equal(tensor, torch.arange(tensor.numel()) + value)


def test_the_first_sync_records_and_later_ones_replay():
    model = Model()
    loader = loader_of(model)
    assert loader_of(model) is loader
    first = sync(loader, 1.0)
    assert (first.num_replayed, first.num_eager) == (0, 2)
    assert first.has_plan
    check_loaded(model, 1.0)
    calls = model.calls
    for value in (2.0, 3.0):
        outcome = sync(loader, value)
        assert (outcome.num_replayed, outcome.num_eager, outcome.reason) == (2, 0, None)
        check_loaded(model, value)
    assert model.calls == calls


def move_a_parameter(model):
    model.c = nn.Parameter(model.c.clone(), requires_grad=False)


CHANGES = {
    "context": (None, {"context": {**CONTEXT, "tp_rank": 1}}, "tp_rank was 0, now 1"),
    "expert map": (None, {"context": {**CONTEXT, "expert_map": b"1111"}}, "expert_map was"),
    "moved parameter": (move_a_parameter, {}, "c was rebound"),
    "order": (None, {"layouts": layouts_of("bacd")}, "bucket 0 has another layout"),
    "second bucket": (None, {"layouts": layouts_of("abdc")}, "bucket 1 has another layout"),
    "more": (None, {"layouts": layouts_of((*NAMES, "c", "d"))}, "the plan has 2 buckets"),
    "size": (
        None,
        {"layouts": [BucketLayout(each.tensors, each.nbytes + 256) for each in layouts_of()]},
        "bucket 0 has another layout",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_that_does_not_hold_is_unused(change, caplog):
    prepare, arguments, reason = CHANGES[change]
    model = Model()
    loader = loader_of(model)
    sync(loader, 1.0)
    sync(loader, 2.0)
    if prepare is not None:
        prepare(model)
    with caplog.at_level(logging.WARNING):
        outcome = sync(loader, 3.0, **arguments)
    assert outcome.num_eager > 0
    assert reason in outcome.reason
    assert reason in caplog.text
    check_loaded(model, 3.0)
    for value in (4.0, 5.0):
        last = sync(loader, value, **arguments)
        check_loaded(model, value)
    assert last.num_eager == 0


@pytest.mark.parametrize("uses_plan", [True, False])
def test_a_tensor_kept_by_loaders_stays_unchanged(uses_plan):
    """Though the trainer has written the next bucket where it was."""
    model = Waits()
    loader = loader_of(model)
    for value in (1.0, 2.0, 3.0):
        loader.start(CONTEXT, uses_plan=uses_plan)
        staging = torch.zeros(layouts_of()[0].nbytes, dtype=torch.uint8)
        for index, layout in enumerate(layouts_of()):
            staging.copy_(bucket_of(layout, value + 10 * index))
            loader.load(index, layout, BucketSource.flat(staging))
        outcome = loader.finish()
        for number, tensor in enumerate((*model.fused, model.c, model.d)):
            assert torch.equal(tensor, torch.arange(8) + value + 10 * (number // 2))
        assert outcome.num_eager == 2
        assert ("keeps a tensor" in (outcome.reason or "")) == uses_plan


def test_a_reason_is_logged_once(caplog):
    model = Model()
    loader = loader_of(model)
    with caplog.at_level(logging.WARNING):
        for value in range(2 * MAX_RECORDINGS + 4):
            sync(loader, float(value), layouts=layouts_of(NAMES if value % 2 else "bacd"))
            check_loaded(model, float(value))
    assert caplog.text.count("bucket 0 has another layout") == 1
    assert caplog.text.count("did not last for one sync") == 1


def test_short_lived_plans_are_retried_more_rarely():
    loader = loader_of(Model())
    tried, orders = [], (layouts_of(), layouts_of("bacd"))
    for number in range(sum(range(MAX_RECORDINGS)) + 2 * MAX_SYNCS_APART + 10):
        # What the last plan was made of never comes again, until the end.
        layouts = orders[len(tried) % 2]
        if sync(loader, float(number), layouts=layouts).has_plan:
            tried.append(number)
    apart = [later - earlier - 1 for earlier, later in pairwise(tried)]
    assert apart[: MAX_RECORDINGS - 1] == [0] * (MAX_RECORDINGS - 1)
    assert apart[MAX_RECORDINGS - 1 :] == [1, 2, 4, 8, 16, 32, MAX_SYNCS_APART]
    last = orders[(len(tried) - 1) % 2]
    while not sync(loader, 1.0, layouts=last).has_plan:
        pass
    assert sync(loader, 1.0, layouts=last).num_eager == 0
    for number, layouts in enumerate(orders):
        outcome = sync(loader, float(number), layouts=layouts)
    assert outcome.has_plan, "a plan that has lasted begins the count anew"


@pytest.mark.parametrize("kind", [Rebinds, Overlaps])
def test_a_model_without_plan_is_traced_once(kind, caplog):
    model = kind()
    loader = loader_of(model)
    with caplog.at_level(logging.WARNING):
        for value in (1.0, 2.0, 3.0):
            calls = model.calls
            outcome = sync(loader, value)
            assert outcome.num_eager == 2
            assert not outcome.has_plan
            check_loaded(model, value)
    assert model.calls - calls == 2
    assert caplog.text.count("load_weights loads buckets, not the load plan") == 1


def test_a_source_is_never_changed():
    model = AddsToItsSources()
    loader = loader_of(model)
    for value, num_replayed in ((1.0, 0), (2.0, 2), (3.0, 2)):
        outcome = sync(loader, value)
        assert outcome.has_plan
        assert outcome.num_replayed == num_replayed
        check_loaded(model, value + 1)


def test_an_eager_sync_keeps_the_plan():
    model = Model()
    loader = loader_of(model)
    sync(loader, 1.0)
    plan, calls = loader.plan, model.calls
    outcome = sync(loader, 2.0, is_eager=True)
    assert (outcome.num_eager, outcome.has_plan) == (2, True)
    assert model.calls == calls + 2, "each bucket is loaded once"
    check_loaded(model, 2.0)
    assert loader.plan is plan
    assert sync(loader, 3.0).num_replayed == 2
    check_loaded(model, 3.0)


# A sync from the trainer ranks' shards: an engine rank of two reads half of every tensor.

WIDTH = 256
LAYOUTS = layouts_of(width=WIDTH)
ROUND_BYTES = 512
MAPPED = {"all mapped": 2, "one rank sends": 1, "both ranks send": 0}


class Half(Model):
    """Keeps the first half of each tensor."""

    def __init__(self):
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(2, WIDTH // 2), requires_grad=False)
        self.c = nn.Parameter(torch.zeros(WIDTH // 2), requires_grad=False)
        self.d = nn.Parameter(torch.zeros(WIDTH // 2), requires_grad=False)

    def load_weights(self, weights):
        super().load_weights((name, tensor[: WIDTH // 2]) for name, tensor in weights)


@pytest.fixture
def model():
    return Half()


@pytest.fixture
def loader(model):
    """Of the model, which was synced once, and has a plan."""
    made = loader_of(model)
    sync(made, 1.0, layouts=LAYOUTS)
    return made


def by_table(loader, value, num_mapped, *, layouts=LAYOUTS, num_rounds=None, **options):
    """A sync from the shards of two trainer ranks; the first ones are mapped."""
    scattered = Scattered(layouts, num_ranks=2, seed=3)
    buffers = [bucket_of(layout, value) for layout in layouts]
    shards = scattered.shards(buffers, num_mapped=num_mapped)
    loader.start(CONTEXT, **options)
    rounds = loader.plan_table(shards, 2, ROUND_BYTES)
    assert bool(rounds) == (num_mapped < 2)
    loader.load_shards(shards)
    for each in rounds[:num_rounds]:
        assert loader.load_round(scattered.sent(each.sent))
    return loader.finish()


@pytest.mark.parametrize("num_mapped", MAPPED.values(), ids=MAPPED)
def test_a_sync_from_shards_is_the_same_sync(model, loader, num_mapped):
    calls = model.calls
    for value in (2.0, 3.0):
        outcome = by_table(loader, value, num_mapped)
        assert (outcome.num_replayed, outcome.num_eager) == (2, 0)
        check_loaded(model, value)
        assert sync(loader, -value, layouts=LAYOUTS).num_replayed == 2
        check_loaded(model, -value)
    assert model.calls == calls


def test_rounds_bring_only_what_is_read(loader):
    scattered = Scattered(LAYOUTS, num_ranks=2, seed=3)
    shards = scattered.shards([bucket_of(layout, 1.0) for layout in LAYOUTS], num_mapped=0)
    loader.start(CONTEXT)
    rounds = loader.plan_table(shards, 2, ROUND_BYTES)
    num_sent = sum(nbytes for each in rounds for nbytes in each.sent.payloads)
    assert num_sent == 4 * WIDTH // 2 * 4, "half of four tensors"
    assert len(rounds) == num_sent / ROUND_BYTES
    assert all(each.nbytes <= ROUND_BYTES + CUT_BYTES for each in rounds)


def test_without_a_plan_mapped_shards_are_loaded_eagerly(model):
    loader = loader_of(model)
    assert by_table(loader, 1.0, 2).num_eager == 2
    check_loaded(model, 1.0)
    assert by_table(loader, 2.0, 2).num_replayed == 2
    check_loaded(model, 2.0)
    assert by_table(loader, 3.0, 2, is_eager=True).num_eager == 2
    check_loaded(model, 3.0)


NO_PLAN = {
    "there is none": ({"uses_plan": False}, LAYOUTS, "without a load plan"),
    "the sync is eager": ({"is_eager": True}, LAYOUTS, "it has none"),
    "fewer buckets": ({}, LAYOUTS[:1], "the plan has 2 buckets, the sync 1"),
    "another layout": ({}, LAYOUTS[::-1], "bucket 0 has another layout"),
}


@pytest.mark.parametrize(("options", "layouts", "reason"), NO_PLAN.values(), ids=NO_PLAN)
def test_without_a_plan_nothing_is_sent(model, loader, options, layouts, reason):
    calls = model.calls
    with pytest.raises(SessionError, match=f"were to be sent for the load plan .*{reason}"):
        by_table(loader, 2.0, 0, layouts=layouts, **options)
    assert model.calls == calls
    check_loaded(model, 1.0)
    sync(loader, 3.0, layouts=LAYOUTS)
    assert sync(loader, 4.0, layouts=LAYOUTS).num_replayed == 2
    check_loaded(model, 4.0)


def test_a_sync_that_lacks_a_round_is_refused(loader):
    with pytest.raises(SessionError, match=r"\d of 4 rounds came"):
        by_table(loader, 2.0, 0, num_rounds=-1)


def test_a_surplus_or_short_round_is_refused(loader):
    scattered = Scattered(LAYOUTS, num_ranks=2, seed=3)
    shards = scattered.shards([bucket_of(layout, 1.0) for layout in LAYOUTS], num_mapped=0)
    loader.start(CONTEXT)
    rounds = loader.plan_table(shards, 2, ROUND_BYTES)
    loader.load_shards(shards)
    with pytest.raises(ValueError, match="the buffer has"):
        loader.load_round(scattered.sent(rounds[0].sent)[:-1])
    loader.start(CONTEXT)
    rounds = loader.plan_table(shards, 2, ROUND_BYTES)
    loader.load_shards(shards)
    for each in rounds:
        loader.load_round(scattered.sent(each.sent))
    with pytest.raises(ValueError, match="another round came after all 4"):
        loader.load_round(scattered.sent(rounds[0].sent))


def test_a_failed_table_replay_is_repeated_eagerly(model, loader):
    fails = mock.Mock(side_effect=torch.OutOfMemoryError("no memory"))
    with mock.patch("sglang_loader.load_plan.executor.TableRun.begin", fails):
        outcome = by_table(loader, 2.0, 2)
    assert outcome.num_eager == 2 and "no memory" in outcome.reason
    check_loaded(model, 2.0)
    with mock.patch("sglang_loader.load_plan.executor.CopyTable.of", fails):
        sync(loader, 3.0, layouts=LAYOUTS)
        outcome = by_table(loader, 4.0, 2)
    assert outcome.num_replayed == 0 and "no copy table" in outcome.reason
    check_loaded(model, 4.0)


def test_what_a_failed_sync_recorded_is_dropped():
    loader = loader_of(Model())
    loader.start(CONTEXT)
    for index, layout in enumerate(layouts_of()):
        loader.load(index, layout, BucketSource.flat(bucket_of(layout, 1.0)))
    assert loader._recorder._buckets
    loader.start(CONTEXT, uses_plan=False)
    assert not loader._recorder._buckets
