"""Arrangements against a byte-level reference, and on modules against their own loaders."""

from dataclasses import replace
from itertools import accumulate
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sglang_loader.common.layout import (
    BucketLayout,
    BucketTensor,
    decode_arrangements,
    digest_of,
    encode_layout,
)
from sglang_loader.common.regions.arrangement import arranged_nbytes
from sglang_loader.common.regions.coalesce import coalesce, find_overlapping
from sglang_loader.common.regions.geometry import BYTES, StridedCopy, Unit
from sglang_loader.load_plan import executor
from sglang_loader.load_plan.arrange import (
    ALL_WHOLE,
    UNIT_ALIGNMENT,
    ArrangedBuckets,
    arrange,
    num_bytes_read,
)
from sglang_loader.load_plan.plan import SCRATCH, BucketPlan
from sglang_loader.load_plan.verify import arrangement_difference, check_bucket
from support.plan_check import differing, gather, planned, random_bucket, snapshot
from unit.strided_moves import copies_out_of, indices, moves

CAST = Unit(4, 2, (torch.float32, torch.bfloat16))


def plan_of(layout, copies):
    """A plan of copies alone."""
    return BucketPlan(
        layout=layout,
        copies=tuple(copies),
        rest=BucketLayout((), 0),
        written={},
        live_in={},
        host_reads=(),
        writes={},
        left_out=(),
        recomputed=frozenset(),
    )


def origins(arrangement, layout):
    """For every byte of the arranged buffer, the byte of the bucket that it holds."""
    found = {}
    for read in arrangement:
        tensor = layout.tensors[read.tensor]
        places = range(read.start, read.start + read.nbytes)
        offsets = indices(read.offset, [*read.dims, (read.run, 1)]).tolist()
        assert max(offsets) < tensor.nbytes, "a read leaves its tensor"
        assert not found.keys() & places, "two reads share a byte of the arranged buffer"
        found |= zip(places, (tensor.offset + offset for offset in offsets), strict=True)
    assert max(found, default=-1) < arranged_nbytes(arrangement)
    return found


def check_plan(plan):
    """The arranged plan moves the same units from the same bytes of the bucket."""
    arranged = arrange(plan)
    assert arranged is not None
    arrangement, rebased = arranged
    source = origins(arrangement, plan.layout)
    wanted = dict(move for copy in plan.copies for move in moves(copy))
    found = {}
    for copy in rebased.copies:
        for place, (src, unit) in moves(copy):
            span = [source[src + i] for i in range(unit.src_bytes)]
            assert span == list(range(span[0], span[0] + unit.src_bytes))
            assert unit == BYTES or src % unit.src_bytes == 0
            assert place not in found
            found[place] = span[0], unit
    assert found == wanted
    return arrangement, rebased


@st.composite
def buckets(draw):
    """Tensors of float32 and strided, cast, transposed, repeating copies out of them."""
    sizes = draw(st.lists(st.sampled_from([0, 4, 12, 32, 64]), min_size=1, max_size=6))
    step = draw(st.sampled_from([4, 16, 256]))
    offsets = accumulate((-(-size * 4 // step) * step for size in sizes), initial=0)
    shapes = [(f"t{i}", (size,), torch.float32) for i, size in enumerate(sizes)]
    placed = [BucketTensor(*shape, at) for shape, at in zip(shapes, offsets, strict=False)]
    layout = BucketLayout(tuple(placed), placed[-1].offset + -(-placed[-1].nbytes // step) * step)
    copies = []
    dst = [0, 0]
    for _ in range(draw(st.integers(0, 12))):
        tensor = draw(st.sampled_from(layout.tensors))
        unit = draw(st.sampled_from([BYTES, CAST]))
        step = 4 if unit is CAST else draw(st.sampled_from([1, 2, 4]))
        if not tensor.nbytes:
            continue
        copy = draw(copies_out_of(tensor.nbytes, unit, step))
        storage = draw(st.integers(0, 1))
        gap = draw(st.sampled_from([0, 0, 1, 6])) if unit is BYTES else dst[storage] % 2
        at = {"src": tensor.offset + copy.src, "dst": dst[storage] + gap}
        copies.append(replace(copy, storage=storage, **at))
        dst[storage] = copies[-1].dst_bounds()[1]
    order = draw(st.permutations(copies))
    return plan_of(layout, coalesce(order) if draw(st.booleans()) else list(order))


@given(buckets())
@settings(max_examples=200, deadline=None)
def test_an_arranged_plan_moves_the_same_bytes(plan):
    assert not find_overlapping(plan.copies)
    arrangement, _ = check_plan(plan)
    buffer = torch.randint(0, 256, (plan.layout.nbytes,), dtype=torch.uint8)
    gathered = gather(arrangement, plan.layout, buffer)
    for at, origin in origins(arrangement, plan.layout).items():
        assert gathered[at] == buffer[origin]


def experts(num, *, ranks):
    """Rank 0's share of gate, up [i, h] and down [h, i] for w13 [e, 2 i, h] and w2 [e, h, i]."""
    i, h, size = 8 * ranks, 16, 2
    names = [(f"{lane}{e}", e, lane) for e in range(num) for lane in ("gate", "up", "down")]
    shape = {"gate": (i, h), "up": (i, h), "down": (h, i)}
    layout = BucketLayout.pack((n, shape[lane], torch.bfloat16) for n, _, lane in names)
    copies, part = [], i // ranks
    for tensor, (_, e, lane) in zip(layout.tensors, names, strict=True):
        if lane == "down":
            dims, run = ((h, i * size, part * size),), part * size
            copies.append(StridedCopy(1, tensor.offset, e * h * part * size, dims, run))
        else:
            dst = (2 * e + (lane == "up")) * part * h * size
            copies.append(StridedCopy(0, tensor.offset, dst, (), part * h * size))
    return plan_of(layout, coalesce(copies))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_experts_of_a_rank_become_few_copies(ranks):
    plan = experts(32, ranks=ranks)
    arrangement, rebased = check_plan(plan)
    part = 8 * 16 * 2  # of gate, up and down alike: its rows are dense, gate and up adjoin
    assert [(copy.storage, copy.run) for copy in rebased.copies] == [(0, 2 * part), (1, part)]
    assert all(len(copy.dims) == 1 for copy in rebased.copies)
    assert len(plan.copies) >= len(rebased.copies)
    assert arranged_nbytes(arrangement) * ranks <= plan.layout.nbytes
    assert len(arrangement) == 3 * 32
    assert num_bytes_read(plan) * ranks == sum(t.nbytes for t in plan.layout.tensors)


def test_words_stay_words():
    """A destination at an odd place is read from one that is as odd."""
    layout = BucketLayout.pack([("a", (64,), torch.uint8), ("b", (64,), torch.uint8)])
    copies = [StridedCopy(0, 0, 8, (), 24), StridedCopy(0, 256, 35, (), 9)]
    _, rebased = check_plan(plan_of(layout, copies))
    for copy in rebased.copies:
        assert copy.src % UNIT_ALIGNMENT == copy.dst % UNIT_ALIGNMENT


T = BucketLayout.pack([("t", (16, 16), torch.float32)])
READ_ONCE = {  # copies of that tensor; what is read of it (offset, dims, run)
    "twice": ([StridedCopy(i, 0, 0, (), 512) for i in range(2)], [(0, (), 512)]),
    "in parts that overlap": (
        [StridedCopy(0, 0, 0, (), 768), StridedCopy(1, 256, 0, (), 768)],
        [(0, (), 1024)],
    ),
    "again and again": ([StridedCopy(0, 0, 0, ((3, 0, 16),), 16)], [(0, (), 16)]),
    "transposed": ([StridedCopy(0, 0, 0, ((16, 2, 16), (8, 64, 2)), 2)], [(0, ((8, 64),), 32)]),
}


@pytest.mark.parametrize(("copies", "reads"), READ_ONCE.values(), ids=READ_ONCE)
def test_bytes_read_are_sent_once_in_their_order(copies, reads):
    arrangement, rebased = check_plan(plan_of(T, copies))
    assert [(read.offset, read.dims, read.run) for read in arrangement] == reads
    assert len(rebased.copies) == len(copies)


def test_reads_across_tensor_bounds_are_not_arranged():
    layout = BucketLayout.pack([("a", (64,), torch.float32), ("b", (64,), torch.float32)])
    assert arrange(plan_of(layout, [StridedCopy(0, 0, 0, (), 512)])) is not None
    layout = BucketLayout.pack([("a", (63,), torch.float32), ("b", (64,), torch.float32)])
    assert arrange(plan_of(layout, [StridedCopy(0, 0, 0, (), 512)])) is None


def test_a_bucket_read_almost_whole_comes_whole(monkeypatch):
    small = BucketLayout.pack([("s", (64,), torch.uint8)])
    half = plan_of(T, [StridedCopy(0, 0, 0, (), 512)])
    far_apart = plan_of(small, [StridedCopy(i, i, 0, (), 1) for i in range(8)])  # 16 are sent each
    found = ArrangedBuckets.of([half, far_apart])
    assert found.bucket(0) == arrange(half) and found.bucket(1) is found.bucket(2) is None
    layouts = {digest_of(encode_layout(layout)): layout for layout in (T, small)}
    (_, first), (_, second) = decode_arrangements(found.encoded, layouts)
    assert first == found.bucket(0)[0] and second is None
    monkeypatch.setattr("sglang_loader.load_plan.arrange.arrange", pytest.fail)
    most = plan_of(T, [StridedCopy(0, 0, 0, (), 1000)])  # known from what its copies read
    assert ArrangedBuckets.of([most]) is ALL_WHOLE


# On modules: what is more than a copy.

SOURCES = [
    ("w", (8, 16), torch.float32),
    ("b", (16,), torch.bfloat16),
    ("n", (16,), torch.float32),
    ("q", (8, 16), torch.float32),
    ("k", (8, 16), torch.float32),
    ("ignored", (64,), torch.float32),
]


class Half(nn.Module):
    """Rank 0 of 2: slices, a transpose, casts, `n + 1`, `cat`, and a source changed in place."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 16), requires_grad=False)
        self.wt = nn.Parameter(torch.zeros(16, 4), requires_grad=False)
        self.b = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.n = nn.Parameter(torch.zeros(16), requires_grad=False)
        self.n1 = nn.Parameter(torch.zeros(16), requires_grad=False)
        self.qk = nn.Parameter(torch.zeros(8, 16), requires_grad=False)
        self.total = nn.Parameter(torch.zeros(1), requires_grad=False)

    def load_weights(self, weights):
        given = dict(weights)
        if "w" in given:
            self.w.copy_(given["w"][:4])
            self.wt.copy_(given["w"][4:].t())
        if "b" in given:
            self.b.copy_(given["b"][8:])
        if "n" in given:
            self.n.copy_(given["n"] + 1)
            self.n1.copy_(given["n"].add_(1))
        if "q" in given:
            self.qk.copy_(torch.cat([given["q"][:4], given["k"][:4]]))
            self.total.zero_()
            self.total.add_(self.qk.sum())


def test_a_plan_with_other_arranged_reads_is_detected():
    model, (layout, buffer) = Half(), random_bucket(SOURCES, 0)
    whole = planned(model, (layout, buffer))
    (plan,), destinations = whole.buckets, whole.destinations
    assert plan.rest.tensors and plan.copies
    assert check_bucket(model, plan, destinations, model.load_weights, buffer) is None
    arrangement, rebased = arrange(plan)
    assert 5 not in {read.tensor for read in arrangement}, "nobody reads that one"
    before, random_state = snapshot(destinations), torch.get_rng_state()
    with mock.patch.object(executor, "_empty", wraps=executor._empty) as empty:
        assert arrangement_difference(plan, (arrangement, rebased), destinations) is None
    made = [call.args[0] for call in empty.call_args_list]
    assert sum(made) == 2 * plan.rest.nbytes, "scratch was made for storages, too"
    scratch = [copy for copy in rebased.copies if copy.storage == SCRATCH]
    first, *others = [copy for copy in rebased.copies if copy.storage != SCRATCH]
    others += scratch
    shifted = [replace(first, src=first.src + 8), *others]
    a, b, *more = scratch
    swapped = [replace(a, src=b.src), replace(b, src=a.src), *more]
    for wrong in (
        replace(rebased, copies=tuple(shifted)),
        replace(rebased, copies=tuple(others)),
        replace(rebased, copies=(first, *others[: -len(scratch)], *swapped)),
    ):
        assert arrangement_difference(plan, (arrangement, wrong), destinations) is not None
    far = replace(rebased, copies=(replace(first, src=arranged_nbytes(arrangement)),))
    with pytest.raises(ValueError, match="in no piece"):
        arrangement_difference(plan, (arrangement, far), destinations)
    assert differing(destinations, before) == (), "the model was written"
    assert torch.equal(torch.get_rng_state(), random_state), "ranks would sample other tokens"
