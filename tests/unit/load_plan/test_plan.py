"""Trace, compile, replay and refuse, on modules small enough to reason about byte by byte."""

import ctypes
import dataclasses
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.layout import BucketLayout
from sglang_loader.load_plan.executor import PlanExecutor
from sglang_loader.load_plan.plan import PlanRefused
from sglang_loader.load_plan.tracer import trace_bucket
from sglang_loader.load_plan.uses import uses_of
from sglang_loader.load_plan.verify import check_bucket, poison, scramble
from support.plan_check import differing, planned, random_bucket, self_check, snapshot, uncovered

SOURCES = [("w", (6, 8), torch.float32), ("v", (6, 8), torch.float32), ("b", (8,), torch.bfloat16)]


class Model(nn.Module):
    """Destinations of every kind; what is done with a source is the test's `load_one`."""

    def __init__(self, load_one):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(12, 8))
        self.bias16 = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
        self.register_buffer("buffer", torch.zeros(6, 8))
        self.derived = torch.zeros(6, 8)
        self.listed = [torch.zeros(4), {"deep": torch.zeros(3)}]
        self.load_one = load_one

    @torch.no_grad()
    def load_weights(self, weights):
        for name, tensor in weights:
            self.load_one(self, name, tensor)


def pack(seed=0, sources=SOURCES):
    return random_bucket(sources, seed)


def planned_for(load_one):
    """A model, the bucket of all sources, and the plan."""
    model = Model(load_one)
    layout, buffer = pack()
    return model, layout, buffer, planned(model, (layout, buffer))


def planned_in_buckets(load_one, *parts):
    """The plan of the sources in these buckets; it has passed its check."""
    model = Model(load_one)
    buckets = [pack(seed, sources) for seed, sources in enumerate(parts)]
    plan = planned(model, *buckets)
    assert self_check(model, plan, [buffer for _, buffer in buckets]) is None
    return plan


def assert_replays(load_one):
    """Compile, self-check, then replay other weights and compare with an eager load of the same."""
    model, layout, buffer, plan = planned_for(load_one)
    assert self_check(model, plan, [buffer]) is None
    _, other = pack(seed=1)
    model.load_weights(layout.views(other.clone()))
    expected = snapshot(plan.destinations)
    model.load_weights(layout.views(buffer.clone()))
    PlanExecutor(plan, model.load_weights).replay(0, BucketSource.flat(other))
    assert differing(plan.destinations, expected) == ()
    return plan


def refusal(load_one):
    with pytest.raises(PlanRefused) as refused:
        planned_for(load_one)
    return str(refused.value)


def plain(model, name, tensor):
    if name == "b":
        model.bias16.data.copy_(tensor)
    else:
        model.weight.data.narrow(0, 0 if name == "w" else 6, 6).copy_(tensor)


def test_plain_copies_leave_nothing_to_the_loader():
    plan = assert_replays(plain)
    assert (plan.num_copies, plan.num_rest) == (2, 0)
    assert plan.coverage == {"weight": ((0, 384),), "bias16": ((0, 16),)}
    assert set(uncovered(plan)) == {"buffer", "derived", "listed[0]", "listed[1]['deep']"}


def doing(**by_name):
    """A loader that does this with these tensors, and nothing with the others."""
    return lambda model, name, tensor: by_name[name](model, tensor) if name in by_name else None


def transpose_and_broadcast(model, w):
    model.weight[:6, :6].copy_(w[:, :6].t())
    model.derived.copy_(w[0])


def copy_copies(model, w):
    model.buffer.copy_(w.t().contiguous().t())
    model.weight[6:].copy_(torch.cat([w[3:], w[:3]]))


def fill_with_scalars(model, w):
    model.listed[0][1:2].fill_(w[0, 0].item())
    model.bias16[2:3].fill_(w[0, 1].item())


def compute_for_nothing(model, w):
    (w.float().abs() * 3).max()
    torch.randn(4)
    model.buffer.copy_(w)


def fill_a_temporary(model, w):
    scratch = torch.empty(6, 8)
    scratch[:3].copy_(w[3:])
    scratch[3:].copy_(w[:3])
    model.buffer.copy_(scratch.mul_(2))


def change_in_place(model, w):
    model.derived.copy_(w)
    w += 1
    model.buffer.copy_(w)


ORDER = torch.tensor([5, 4, 3, 2, 1, 0])


@pytest.mark.parametrize(
    ("load", "num_copies", "num_rest"),
    [
        (lambda model, w: model.bias16.copy_(w[0]), 1, 0),  # a cast
        (transpose_and_broadcast, 2, 0),
        (copy_copies, 0, 1),
        (fill_with_scalars, 2, 0),
        (compute_for_nothing, 1, 0),
        (fill_a_temporary, 0, 1),
        (lambda model, w: model.buffer.copy_(w[ORDER]), 0, 1),
        (change_in_place, 0, 1),
    ],
)
def test_what_is_done_with_a_tensor_is_replayed(load, num_copies, num_rest):
    plan = assert_replays(doing(w=load))
    assert (plan.num_copies, plan.num_rest) == (num_copies, num_rest)
    model = Model(doing(w=load))
    assert uses_of(trace_bucket(model, model.load_weights, *pack())).unused == ["v", "b"]


def derive(model, name, tensor):
    plain(model, name, tensor)
    if name == "w":
        model.derived.copy_(model.weight[:6] @ torch.eye(8) + 1)


def to_buffer(model, tensor):
    model.buffer.copy_(tensor)


def in_a_thread_pool(model, name, tensor):
    with ThreadPoolExecutor() as pool:
        pool.submit(plain, model, name, tensor).result()


@pytest.mark.parametrize(
    ("load_one", "num_copies", "rest"),
    [
        (derive, 2, ["w"]),
        (doing(w=to_buffer, v=lambda model, v: model.buffer[:3].copy_(v[:3])), 0, ["w", "v"]),
        (in_a_thread_pool, 2, []),
    ],
)
def test_steps_of_several_tensors_replay_in_order(load_one, num_copies, rest):
    plan = assert_replays(load_one)
    left = [tensor.name for tensor in plan.buckets[0].rest.tensors]
    assert (plan.num_copies, left) == (num_copies, rest)
    assert ("derived" in plan.coverage) == (load_one is derive)


@pytest.mark.parametrize("made", [lambda buffer: buffer, lambda buffer: buffer * 2])
def test_a_copy_follows_the_reader_of_its_target(made):
    def read_and_write(model, w):
        model.derived.copy_(made(model.buffer) + w)
        model.buffer.copy_(w)

    model, layout, buffer, plan = planned_for(doing(w=read_and_write))
    assert plan.num_copies == 0
    model.buffer.zero_()
    PlanExecutor(plan, model.load_weights).replay(0, BucketSource.flat(buffer))
    source = layout.views(buffer)[0][1]
    assert torch.equal(model.derived, source)
    # `buffer` is written, but an update also needs what was there: it is not covered.
    assert "buffer" not in plan.coverage
    assert self_check(model, plan, [buffer]) is not None


def test_buckets_are_planned_one_by_one():
    plan = planned_in_buckets(plain, SOURCES[:1], SOURCES[1:])
    assert [len(bucket.copies) for bucket in plan.buckets] == [1, 2]
    assert plan.coverage["weight"] == ((0, 384),)


def pick_to_buffer(model, tensor):
    model.buffer[torch.arange(3)] = tensor[:3]


def derive_from_buffer(model, _):
    model.derived.copy_(model.buffer + 1)


def cover_half_of_buffer(model, _):
    model.buffer[3:].zero_()


DERIVES = "computes derived from weights that other"


def fill_derived(model, tensor):
    model.derived.copy_(tensor * 2)
    model.buffer[:4].fill_(1)


@pytest.mark.parametrize(
    ("done", "reason"),
    [
        ({"w": to_buffer, "b": derive_from_buffer}, DERIVES),
        ({"w": pick_to_buffer, "b": derive_from_buffer}, DERIVES),
        ({"w": derive_from_buffer, "b": to_buffer}, DERIVES),
        (
            {
                "w": derive_from_buffer,
                "b": lambda model, _: model.buffer.copy_(model.weight[:6] + 1),
            },
            DERIVES,
        ),
        ({"w": to_buffer, "b": cover_half_of_buffer}, "writes buffer again in a bucket without"),
        (
            {
                "w": lambda model, _: model.buffer.zero_(),
                "v": lambda model, v: model.derived.copy_(model.buffer + v),
                "b": to_buffer,
            },
            "writes buffer again in a bucket without",
        ),
        ({"w": fill_derived, "b": cover_half_of_buffer}, "writes buffer more than once without"),
    ],
)
def test_refuses_what_is_made_of_another_bucket(done, reason):
    """No tensor of its own bucket says that it must be made again."""
    with pytest.raises(PlanRefused, match=reason):
        planned(Model(doing(**done)), *(pack(i, SOURCES[i : i + 1]) for i in range(3)))


def test_derived_tensors_are_made_in_their_inputs_bucket():
    def load_one(model, name, tensor):
        plain(model, name, tensor)
        model.derived.copy_(model.weight[:6] + 1)

    plan = planned_in_buckets(load_one, *(SOURCES[i : i + 1] for i in (2, 0, 1)))
    assert [len(bucket.rest.tensors) for bucket in plan.buckets] == [0, 1, 0]


def test_tensors_without_inputs_stay_unchanged():
    def load_one(model, name, tensor):
        if name == "w":
            model.weight.data.zero_()
        plain(model, name, tensor)
        model.derived.copy_(model.listed[0][0] + 1)

    plan = planned_in_buckets(load_one, SOURCES[:1], SOURCES[1:])
    assert (plan.num_copies, plan.num_rest) == (3, 0)


def test_memory_bound_by_first_load_is_planned():
    def load_one(model, name, tensor):
        if name == "b":
            model.bias16.copy_(tensor)
        elif not hasattr(model, f"late_{name}"):
            setattr(model, f"late_{name}", tensor.clone())
        else:
            getattr(model, f"late_{name}").copy_(tensor)

    plan = planned_in_buckets(load_one, SOURCES[:1], SOURCES[1:])
    assert {"late_w", "late_v"} <= plan.coverage.keys()


# Refusals ---------------------------------------------------------------------------------------


OUTSIDE = torch.zeros(6, 8)


def write_and_look(model, w):
    model.weight[:6].copy_(w)
    bool(model.weight.abs().sum() > 0)


def look_at_buffer(model, v):
    if bool(model.buffer.sum() > -1000):
        model.derived.copy_(v)


@pytest.mark.parametrize(
    ("done", "reason"),
    [
        ({"w": lambda model, w: setattr(model, "derived", w.clone())}, "derived was rebound"),
        (
            {"w": lambda model, w: setattr(model.weight, "data", torch.cat([w, w]))},
            "weight was rebound",
        ),
        ({"w": lambda model, w: model.buffer.copy_(w + torch.rand(6, 8))}, "random"),
        ({"w": lambda model, w: OUTSIDE.copy_(w)}, "does not reach"),
        ({"w": lambda model, w: model.buffer.resize_(6, 8).copy_(w)}, "in place"),
        ({"w": write_and_look}, "Python reads the data of weight"),
        ({"w": pick_to_buffer, "v": look_at_buffer}, "Python reads the data of buffer"),
    ],
)
def test_what_copies_cannot_do_is_refused(done, reason):
    assert reason in refusal(doing(**done))


class _InAutograd(torch.autograd.Function):
    @staticmethod
    def forward(context, tensor):
        return ctypes.c_float.from_address(tensor.untyped_storage().data_ptr()).value


@pytest.mark.parametrize(
    "look",
    [
        lambda t: t[0, 0].item() > 0,
        lambda t: bool(t.sum() > 0),
        lambda t: float(t.abs().max()),
        lambda t: t.tolist(),
        lambda t: t.numpy().sum(),
        lambda t: np.asarray(t).sum(),
        lambda t: np.from_dlpack(t).sum(),
        lambda t: torch.equal(t, t + 1),
        lambda t: t[t > 0].numel(),
        lambda t: t.nonzero().shape,
        lambda t: t.data_ptr(),
        lambda t: f"{t[0, 0].item():.3f}",
        repr,
        lambda t: f"{t}",
        lambda t: t.untyped_storage().data_ptr(),
        lambda t: t.clone().untyped_storage()[0],
        lambda t: t.untyped_storage().tolist(),
        lambda t: t.storage()[0],
        lambda t: pickle.dumps(t),
        lambda t: torch.save(t.clone(), io.BytesIO()),
        lambda t: t.clone().apply_(abs),
        lambda t: t.clone().map_(torch.zeros(6, 8), max),
        lambda t: torch.zeros(6, 8).map_(t, max),
        lambda t: torch.zeros(6, 8).map2_(t * 2, t, max),
        lambda t: torch.arange(4).tensor_split((t[0, :1] > 0).long()),
        lambda t: torch.tensor_split(
            torch.arange(4), tensor_indices_or_sections=(t[0, :1] > 0).long()
        ),
        lambda t: torch.utils.dlpack.to_dlpack(t),
        lambda t: torch._C._to_dlpack_versioned(t.clone()),
        lambda t: _InAutograd.apply(t),
    ],
)
def test_refuses_host_reads_of_sources(look):
    def load_one(model, name, tensor):
        plain(model, name, tensor)
        if name == "w":
            look(tensor)

    assert "Python reads the data of w" in refusal(load_one)


def test_a_split_at_plain_numbers_is_a_view():
    def load(model, w):
        for target, part in zip(model.weight[:6].tensor_split(2), w.tensor_split(2), strict=True):
            target.copy_(part)

    assert assert_replays(doing(w=load)).num_rest == 0


def test_watching_leaves_torch_as_it_was():
    before = torch._C._to_dlpack, torch.to_dlpack, torch.utils.dlpack.to_dlpack
    assert "Python reads" in refusal(doing(w=lambda _, w: torch.utils.dlpack.to_dlpack(w)))
    assert (torch._C._to_dlpack, torch.to_dlpack, torch.utils.dlpack.to_dlpack) == before


def test_refuses_a_loader_that_keeps_a_number():
    """Copies would not bring the next sync's."""
    held = {}
    assert "keeps a number" in refusal(doing(w=lambda _, w: held.update(scale=w[0, 1].item())))
    assert isinstance(held["scale"], float), "loaded all the same"


@pytest.mark.parametrize(
    "made", [lambda _, w: w[0], lambda _, w: w * 2, lambda model, _: model.buffer + 1]
)
def test_refuses_a_loader_that_keeps_unreachable_tensors(made):
    """Whatever is made of it later would be of the scrambled bytes of the check."""
    held = {}

    def load(model, w):
        model.buffer.copy_(w)
        held["pending"] = made(model, w)

    model = Model(doing(w=load))
    layout, buffer = pack()
    with pytest.raises(PlanRefused, match="keeps a tensor"):
        planned(model, (layout, buffer))
    model.buffer.copy_(layout.views(buffer)[0][1])
    assert torch.equal(held["pending"], made(model, layout.views(buffer)[0][1]))


def test_tensors_held_by_a_cycle_are_not_kept():
    def load(model, w):
        def again():
            return again, w  # a function that calls itself

        model.buffer.copy_(w)

    assert assert_replays(doing(w=load)).num_copies == 1


def test_what_is_not_written_may_be_read():
    def load_one(model, name, tensor):
        plain(model, name, tensor)
        model.listed[0].tolist()
        model.buffer.sum().item()

    assert_replays(load_one)


def test_refuses_a_loader_that_fails_under_tracing():
    calls = []

    def load_one(model, name, tensor):
        calls.append(name)
        if len(calls) == 1:
            raise OSError("not the first time")

    assert "not the first time" in refusal(load_one)
    assert len(calls) == 1 + len(SOURCES), "loaded all the same"


# The self-check ---------------------------------------------------------------------------------


def test_self_check_finds_writes_from_other_threads():
    def load_one(model, name, tensor):
        worker = threading.Thread(target=plain, args=(model, name, tensor))
        worker.start()
        worker.join()

    model, layout, buffer, plan = planned_for(load_one)
    assert plan.num_copies == 0
    traced = trace_bucket(model, model.load_weights, layout, buffer)
    assert uses_of(traced).unused == ["w", "v", "b"]
    reason = self_check(model, plan, [buffer])
    assert reason == "2 tensors differ from what load_weights loads: weight, bias16"
    assert torch.equal(model.weight[:6], layout.views(buffer)[0][1])


def exponents(tensor):
    """As kernels pack scales that are powers of two: the exponents alone."""
    return (tensor.view(torch.int32) >> 23).to(torch.uint8)


@pytest.mark.parametrize(
    ("dtype", "unseen"),
    [
        (torch.int8, lambda t: t >> 4),
        (torch.uint8, lambda t: t >> 4),
        (torch.int32, lambda t: t >> 1),
        (torch.float8_e4m3fn, lambda t: t.float().abs()),
        (torch.float8_e5m2, lambda t: t.float().abs()),
        (torch.float8_e8m0fnu, lambda t: t.view(torch.uint8) >> 1),
        (torch.float32, exponents),
        (torch.bfloat16, lambda t: exponents(t.float())),
        (torch.complex64, lambda t: t.imag),
    ],
)
def test_self_check_finds_an_unseen_partial_element_write(dtype, unseen):
    def load_one(model, name, tensor):
        model.weight.data[:6].copy_(tensor.real if dtype.is_complex else tensor)
        worker = threading.Thread(target=lambda: model.buffer.copy_(unseen(tensor)))
        worker.start()
        worker.join()

    model = Model(load_one)
    layout = BucketLayout.pack([("w", (6, 8), dtype)])
    buffer = torch.full((layout.nbytes // 4,), 1.25).view(torch.uint8)
    if dtype.itemsize == 1:
        buffer = torch.arange(20, 20 + layout.nbytes).to(torch.uint8)
    plan = planned(model, (layout, buffer))
    assert (plan.num_copies, plan.num_rest) == (1, 0)
    reason = self_check(model, plan, [buffer])
    assert reason == "1 tensors differ from what load_weights loads: buffer"


@pytest.mark.parametrize("hidden", ("to where the plan writes nothing", "to where it wrote before"))
def test_a_later_check_finds_writes_elsewhere(hidden):
    def write(model, tensor):
        if hidden == "to where it wrote before":
            model.weight.data[:6].copy_(tensor)
        else:
            model.buffer.copy_(tensor)

    def load_one(model, name, tensor):
        plain(model, name, tensor)
        if name == "v":
            worker = threading.Thread(target=write, args=(model, tensor))
            worker.start()
            worker.join()

    model = Model(load_one)
    first, second = pack(0, SOURCES[:1]), pack(1, SOURCES[1:])
    plan = planned(model, first, second)
    (one, other), destinations = plan.buckets, plan.destinations
    model.load_weights(first[0].views(first[1].clone()))
    after_one = {}
    assert check_bucket(model, one, destinations, model.load_weights, first[1], after_one) is None
    for known in (after_one, None):
        reason = check_bucket(model, other, destinations, model.load_weights, second[1], known)
        assert reason is not None
        assert ("buffer" in reason) == (hidden == "to where the plan writes nothing")


def test_self_check_finds_misplaced_copies_and_restores_weights():
    model, _, buffer, plan = planned_for(plain)
    expected = snapshot(plan.destinations)
    bucket = plan.buckets[0]
    moved = msgspec.structs.replace(bucket.copies[0], src=bucket.copies[0].src + 4)
    for copies in ((moved, *bucket.copies[1:]), bucket.copies[1:]):
        broken = dataclasses.replace(plan, buckets=(dataclasses.replace(bucket, copies=copies),))
        reason = self_check(model, broken, [buffer])
        assert reason is not None and "differ" in reason
        assert differing(plan.destinations, expected) == ()


def test_a_failed_check_leaves_no_scrambled_bytes():
    def load(model, w):
        model.buffer.copy_(torch.maximum(model.buffer, w))

    model, layout, buffer, plan = planned_for(doing(w=load))
    assert self_check(model, plan, [buffer]) is not None
    assert torch.equal(model.buffer, layout.views(buffer)[0][1].clamp(min=0))


def test_scramble_changes_every_element_and_keeps_floats_finite():
    eight_bits = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float64, *eight_bits, torch.int32]
    layout, buffer = pack(0, [(str(d), (64,), d) for d in dtypes])
    other = scramble(layout, buffer)
    for (_, a), (_, b) in zip(layout.views(buffer), layout.views(other), strict=True):
        assert bool((a.float() != b.float()).all())
        assert bool(b.float().isfinite().all())


def test_poison_fills_what_is_covered_and_nothing_else():
    model, _, _, plan = planned_for(plain)
    model.buffer.fill_(7)
    poison(plan.buckets[0], plan.destinations)
    assert bool((plan.destinations.memory[0] == 0xA5).all())
    assert bool((model.buffer == 7).all())


# Execution --------------------------------------------------------------------------------------


def test_replay_binds_once_per_buffer_and_lets_go():
    model, layout, _, plan = planned_for(plain)
    executor = PlanExecutor(plan, model.load_weights)
    staging = torch.zeros(3 * layout.nbytes + 8, dtype=torch.uint8)
    starts = (0, layout.nbytes, layout.nbytes + 4)
    parts = [staging[start : start + layout.nbytes] for start in starts]
    sources = [BucketSource.flat(part) for part in parts]
    for i in (0, 1, 2, 0):
        parts[i].copy_(pack(seed=i + 2)[1])
        executor.replay(0, sources[i])
        assert torch.equal(model.weight[:6].view(-1).view(torch.uint8), parts[i][:192])
    assert len(executor._bound) == 3
    del sources
    assert not executor._bound


def test_replay_rejects_what_is_not_the_bucket():
    model, _, buffer, plan = planned_for(plain)
    executor = PlanExecutor(plan, model.load_weights)
    with pytest.raises(ValueError, match="uint8"):
        executor.replay(0, BucketSource.flat(buffer.view(torch.float32)))
    with pytest.raises(IndexError):
        executor.replay(1, BucketSource.flat(buffer))
