"""One model's syncs: recorded, replayed, and eager again wherever the plan does not hold."""

import logging
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import nn

from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.layout import BucketLayout, decode_arrangements, digest_of, encode_layout
from sglang_loader.common.regions.arrangement import arranged_nbytes
from sglang_loader.common.session.messages import SessionError
from sglang_loader.load_plan.arrange import ALL_WHOLE, arrange
from sglang_loader.session.model_loader import MAX_RECORDINGS, MAX_SYNCS_APART, loader_of
from sglang_loader.session.serve import common_arrangements
from support.plan_check import gather

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
    assert first.may_read_in_place
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
        if sync(loader, float(number), layouts=layouts).may_read_in_place:
            tried.append(number)
    apart = [later - earlier - 1 for earlier, later in pairwise(tried)]
    assert apart[: MAX_RECORDINGS - 1] == [0] * (MAX_RECORDINGS - 1)
    assert apart[MAX_RECORDINGS - 1 :] == [1, 2, 4, 8, 16, 32, MAX_SYNCS_APART]
    last = orders[(len(tried) - 1) % 2]
    while not sync(loader, 1.0, layouts=last).may_read_in_place:
        pass
    assert sync(loader, 1.0, layouts=last).num_eager == 0
    for number, layouts in enumerate(orders):
        outcome = sync(loader, float(number), layouts=layouts)
    assert outcome.may_read_in_place, "a plan that has lasted begins the count anew"


@pytest.mark.parametrize("kind", [Rebinds, Overlaps])
def test_a_model_without_plan_is_traced_once(kind, caplog):
    model = kind()
    loader = loader_of(model)
    with caplog.at_level(logging.WARNING):
        for value in (1.0, 2.0, 3.0):
            calls = model.calls
            outcome = sync(loader, value)
            assert outcome.num_eager == 2
            assert not outcome.may_read_in_place
            check_loaded(model, value)
    assert model.calls - calls == 2
    assert caplog.text.count("load_weights loads buckets, not the load plan") == 1


def test_a_source_is_never_changed():
    model = AddsToItsSources()
    loader = loader_of(model)
    for value, num_replayed in ((1.0, 0), (2.0, 2), (3.0, 2)):
        outcome = sync(loader, value)
        assert outcome.may_read_in_place
        assert outcome.num_replayed == num_replayed
        check_loaded(model, value + 1)


def test_an_eager_sync_keeps_the_plan():
    model = Model()
    loader = loader_of(model)
    sync(loader, 1.0)
    plan, calls = loader.plan, model.calls
    outcome = sync(loader, 2.0, is_eager=True)
    assert (outcome.num_eager, outcome.may_read_in_place) == (2, True)
    assert model.calls == calls + 2, "each bucket is loaded once"
    check_loaded(model, 2.0)
    assert loader.plan is plan
    assert sync(loader, 3.0).num_replayed == 2
    check_loaded(model, 3.0)


# Buckets that come arranged: a rank of two reads half of every tensor.

WIDTH = 256
LAYOUTS = layouts_of(width=WIDTH)


class Half(Model):
    """Keeps the first half of each tensor."""

    def __init__(self):
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(2, WIDTH // 2), requires_grad=False)
        self.c = nn.Parameter(torch.zeros(WIDTH // 2), requires_grad=False)
        self.d = nn.Parameter(torch.zeros(WIDTH // 2), requires_grad=False)

    def load_weights(self, weights):
        super().load_weights((name, tensor[: WIDTH // 2]) for name, tensor in weights)


def arrangements_of(loader):
    """What a trainer learns from the offer."""
    layouts = {digest_of(encode_layout(layout)): layout for layout in LAYOUTS}
    arranged = loader.arrange()
    assert arranged.digest == digest_of(arranged.encoded)
    buckets = decode_arrangements(arranged.encoded, layouts)
    assert [digest for digest, _ in buckets] == list(layouts)
    return [arrangement for _, arrangement in buckets]


def sync_halves(loader, value, *, is_eager=False):
    return sync(loader, value, layouts=LAYOUTS, is_eager=is_eager)


def sync_arranged(loader, value):
    loader.start(CONTEXT)
    for index, layout in enumerate(LAYOUTS):
        gathered = gather(arrangements_of(loader)[index], layout, bucket_of(layout, value))
        assert loader.load(index, layout, BucketSource.flat(gathered), arranged=True)
    return loader.finish()


@pytest.fixture
def model():
    return Half()


@pytest.fixture
def loader(model):
    """Of the model, which was synced once, and has a plan."""
    made = loader_of(model)
    sync_halves(made, 1.0)
    return made


def test_an_arranged_sync_is_the_same_sync():
    model = Half()
    loader = loader_of(model)
    loader.start(CONTEXT)
    assert loader.plan is None
    assert loader.arranged is loader.arrange() is ALL_WHOLE
    sync_halves(loader, 1.0)
    assert [arranged_nbytes(a) for a in arrangements_of(loader)] == [1024, 1024]
    calls = model.calls
    for value, sync_by in ((2.0, sync_arranged), (3.0, sync_halves), (4.0, sync_arranged)):
        outcome = sync_by(loader, value)
        assert (outcome.num_replayed, outcome.num_eager) == (2, 0)
        check_loaded(model, value)
    assert model.calls == calls


def test_arrangements_need_a_request_and_a_plan(loader):
    loader.start(CONTEXT)
    assert loader.arranged is ALL_WHOLE
    first, arranged = loader.plan, loader.arrange()
    assert loader.arranged is arranged is not ALL_WHOLE
    loader.start(CONTEXT, is_eager=True)
    assert loader.arranged is ALL_WHOLE
    assert sync_halves(loader, 2.0, is_eager=True).num_eager == 2
    assert loader.plan is first
    loader.start(CONTEXT)
    assert loader.arranged is arranged


def test_whole_buckets_replace_arranged_ones_that_differ(loader, caplog, monkeypatch):
    def misplaced(plan):
        arranged = arrange(plan)
        *others, last = arranged.plan.copies
        copies = *(replace(copy, src=copy.src + 8) for copy in others), last
        return arranged._replace(plan=replace(arranged.plan, copies=copies))

    monkeypatch.setattr("sglang_loader.load_plan.arrange.arrange", misplaced)
    assert loader.arrange() is ALL_WHOLE
    assert "will be sent: bucket 1: what it reads gives other data" in caplog.text


def test_what_cannot_be_proved_now_is_asked_again(loader, caplog, monkeypatch):
    with monkeypatch.context() as patch:
        for_lack = mock.Mock(side_effect=torch.OutOfMemoryError("no memory"))
        patch.setattr("sglang_loader.session.model_loader.arrangement_difference", for_lack)
        assert loader.arrange() is ALL_WHOLE
    assert "the check failed: OutOfMemoryError('no memory')" in caplog.text
    assert loader.arrange() is not ALL_WHOLE


def test_an_arranged_bucket_is_never_loaded_otherwise():
    model = Half()
    loader = loader_of(model)

    def check_refused(reason, index, layout, *, error=SessionError, nbytes=1024):
        calls, source = model.calls, BucketSource.flat(torch.zeros(nbytes, dtype=torch.uint8))
        with pytest.raises(error, match=reason):
            loader.load(index, layout, source, arranged=True)
        assert model.calls == calls

    loader.start(CONTEXT)
    check_refused("no arrangement of this bucket", 0, LAYOUTS[0])
    sync_halves(loader, 1.0)
    loader.start(CONTEXT, is_eager=True)
    check_refused("no arrangement of this bucket", 0, LAYOUTS[0])
    for index, layout, reason in (
        (0, LAYOUTS[1], "bucket 0 has another layout"),
        (2, LAYOUTS[1], "the plan has 2 buckets"),
    ):
        sync_halves(loader, 2.0)
        sync_halves(loader, 2.0)
        loader.arrange()
        loader.start(CONTEXT)
        check_refused(reason, index, layout)
        assert loader.plan is None
        check_refused(reason, 1, LAYOUTS[1])
    sync_halves(loader, 3.0)
    loader.arrange()
    loader.start(CONTEXT)
    check_refused("in no piece", 0, LAYOUTS[0], error=ValueError, nbytes=1023)
    assert sync_halves(loader, 5.0).num_replayed == 2
    check_loaded(model, 5.0)


@pytest.mark.parametrize("second", ["as planned", "another layout"])
def test_whole_buckets_may_follow_arranged_ones(model, loader, second):
    arrangement = arrangements_of(loader)[0]
    layout = LAYOUTS[1]
    if second == "another layout":
        (layout,) = layouts_of("dc", WIDTH)
    loader.start(CONTEXT)
    first = gather(arrangement, LAYOUTS[0], bucket_of(LAYOUTS[0], 2.0))
    assert loader.load(0, LAYOUTS[0], BucketSource.flat(first), arranged=True)
    whole = BucketSource.flat(bucket_of(layout, 2.0))
    replayed = loader.load(1, layout, whole)
    assert replayed == (second == "as planned")
    outcome = loader.finish()
    assert (outcome.num_replayed, outcome.num_eager) == ((2, 0) if replayed else (1, 1))
    check_loaded(model, 2.0)


def test_two_models_with_plans_get_whole_buckets():
    """Speculative decoding: every bucket is loaded into the draft and into the target."""
    target, draft, same = Half(), Model(), Half()
    loaders = [loader_of(model) for model in (target, draft, same)]
    sync_halves(loaders[0], 1.0)
    sync(loaders[1], 1.0)
    sync_halves(loaders[2], 1.0)
    first, other, twin = (loader.arrange() for loader in loaders)
    assert other is ALL_WHOLE
    assert common_arrangements([first]) is first
    assert common_arrangements([first, other]) is common_arrangements([other, first]) is ALL_WHOLE
    assert common_arrangements([first, twin]) is first, "one arrangement serves both"
