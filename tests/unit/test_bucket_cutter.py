"""Which tensors share a bucket, by property: the filler, and the cutter that keeps its buckets."""

import itertools
import math
import random
import weakref
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_loader.common.layout import ALIGNMENT_BYTES
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.sources.bucket_cutter import FUSED_PAIRS, BucketCutter, BucketFiller

DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.bool, torch.int64)


def plan_buckets(specs, *, bucket_bytes):
    """Cut a whole export. Arguments and errors are those of `BucketFiller`."""
    filler = BucketFiller(bucket_bytes=bucket_bytes)
    closed = [bucket for spec in specs for bucket in filler.add(spec)]
    return closed + filler.finish()


# Written out by hand, not derived from FUSED_PAIRS: full names that must travel together.
PAIRS = (
    # DeepSeek V2/V3, its fp8 scales of both spellings
    ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    ("self_attn.q_a_proj.weight_scale_inv", "self_attn.kv_a_proj_with_mqa.weight_scale_inv"),
    ("self_attn.q_a_proj.weight_scale", "self_attn.kv_a_proj_with_mqa.weight_scale"),
    # LongCat: two attentions in one layer
    ("self_attn.0.q_a_proj.weight", "self_attn.0.kv_a_proj_with_mqa.weight"),
    ("self_attn.1.q_a_proj.weight", "self_attn.1.kv_a_proj_with_mqa.weight"),
    ("self_attn.1.q_a_proj.weight_scale_inv", "self_attn.1.kv_a_proj_with_mqa.weight_scale_inv"),
    # DeepSeek V4, in Hugging Face's and in its own spelling
    ("self_attn.wq_a.weight", "self_attn.wkv.weight"),
    ("self_attn.wq_a.weight_scale_inv", "self_attn.wkv.weight_scale_inv"),
    ("self_attn.wq_a.scale", "self_attn.wkv.scale"),
    ("attn.wq_a.weight", "attn.wkv.weight"),
    ("attn.wq_a.weight_scale_inv", "attn.wkv.weight_scale_inv"),
    ("attn.wq_a.scale", "attn.wkv.scale"),
    ("attn.compressor.wkv.weight", "attn.compressor.wgate.weight"),
    ("attn.indexer.compressor.wkv.weight", "attn.indexer.compressor.wgate.weight"),
    ("self_attn.compressor.wkv.weight", "self_attn.compressor.wgate.weight"),
    ("self_attn.indexer.compressor.wkv.weight", "self_attn.indexer.compressor.wgate.weight"),
)
# Names close to a group's that belong to none.
LONERS = (
    "mlp.down_proj.weight",
    "self_attn.q_b_proj.weight",
    "self_attn.q_a_layernorm.weight",
    "self_attn.kv_a_proj_with_mqa.bias",
    "self_attn.wo_a.weight",
    "mlp.gate.wkv_norm.weight",
)

dimension = st.integers(0, 40)
shapes = st.one_of(
    st.just(()), st.lists(dimension, min_size=1, max_size=3).map(tuple), st.just((0, 7))
)


@st.composite
def exports(draw):
    """A shuffled export: whole groups, broken groups, loners; names are unique."""
    names = []
    for layer in range(draw(st.integers(1, 2))):
        prefix = f"model.layers.{layer}."
        for pair in draw(st.sets(st.sampled_from(PAIRS), max_size=4)):
            present = draw(st.sampled_from((pair, pair, pair, pair[:1], pair[1:])))
            names += [prefix + suffix for suffix in present]
        names += [prefix + suffix for suffix in draw(st.sets(st.sampled_from(LONERS)))]
    names = draw(st.permutations(names))
    specs = []
    for name in names:
        dtype = draw(st.sampled_from(DTYPES))
        specs.append(Spec(name, draw(shapes), dtype))
    return specs


limits = st.one_of(st.integers(1, 600), st.integers(600, 20_000), st.just(1 << 40))


class Spec(NamedTuple):
    """A `layout.TensorSpec` whose parts have names."""

    name: str
    shape: tuple[int, ...] = (8,)
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self):
        return math.prod(self.shape) * self.dtype.itemsize


def partner_of(name):
    """The other full name of the pair `name` belongs to, by the table above."""
    for pair in PAIRS:
        for mine, other in (pair, pair[::-1]):
            if name.endswith("." + mine):
                return name.removesuffix(mine) + other
    return None


def units_of(specs):
    """Indivisible runs in placing order: a group stands where its last member came."""
    names = {s.name for s in specs}
    waiting, units = {}, []
    for s in specs:
        partner = partner_of(s.name)
        if partner is None:
            units.append([s])
        elif partner in waiting:
            units.append([waiting.pop(partner), s])
        else:
            waiting[s.name] = s
    assert not any(partner_of(name) in names for name in waiting)
    return units + [[s] for s in waiting.values()]


def flat(plan):
    return [Spec(t.name, t.shape, t.dtype) for bucket in plan for t in bucket.tensors]


def padded(nbytes):
    assert ALIGNMENT_BYTES == 256
    return math.ceil(nbytes / 256) * 256


def check_groups_whole(plan):
    bucket_of = {t.name: index for index, bucket in enumerate(plan) for t in bucket.tensors}
    for name, bucket in bucket_of.items():
        assert bucket_of.get(partner_of(name), bucket) == bucket, f"{name} is cut from its partner"


@settings(max_examples=400, deadline=None)
@given(exports(), limits)
def test_tensors_fill_buckets_once_by_unit(specs, limit):
    filler, plan = BucketFiller(bucket_bytes=limit), []
    for each in specs:
        closed = filler.add(each)
        assert len(closed) <= 1
        plan += closed
    plan += filler.finish()
    assert filler.finish() == []

    units = units_of(specs)
    assert flat(plan) == [each for unit in units for each in unit]
    check_groups_whole(plan)
    runs = [[each.name for each in unit] for unit in units]
    size_of = {each.name: padded(each.nbytes) for each in specs}
    for bucket in plan:
        assert bucket.tensors
        assert bucket.nbytes <= limit or [t.name for t in bucket.tensors] in runs
        check_slots(bucket)
    for bucket, successor in itertools.pairwise(plan):
        unit = next(u for u in runs if u[0] == successor.tensors[0].name)
        assert bucket.nbytes + sum(size_of[name] for name in unit) > limit, "cut early"


def check_slots(bucket):
    """Aligned, disjoint and inside the bucket."""
    end = 0
    for t in bucket.tensors:
        assert t.offset % ALIGNMENT_BYTES == 0
        assert t.offset >= end
        end = t.offset + t.nbytes
    assert end <= bucket.nbytes == padded(end)


Q_A, KV_A = (f"l.0.{name}" for name in PAIRS[0])


def test_suffixes_of_pairs_never_overlap():
    suffixes = [suffix for pair in FUSED_PAIRS for suffix in pair]
    assert len(suffixes) == len(set(suffixes))
    assert not [each for each in suffixes for end in suffixes if each != end and each.endswith(end)]
    assert all(
        partner_of("layer.self_attn" + suffix) or partner_of("layer" + suffix)
        for suffix in suffixes
    )


@settings(max_examples=50, deadline=None)
@given(exports(), limits, st.randoms())
@example([Spec("a"), Spec("b")], 1, random.Random(0))
def test_a_name_exported_twice_is_refused(specs, limit, rng):
    if not specs:
        return
    again = rng.choice(specs)
    with pytest.raises(ValueError, match="exported twice") as error:
        plan_buckets([*specs, again], bucket_bytes=limit)
    assert repr(again.name) in str(error.value)


@pytest.mark.parametrize("limit", (0, -1))
def test_a_limit_below_one_is_refused(limit):
    with pytest.raises(ValueError, match=f"bucket_bytes={limit}: expected at least 1"):
        plan_buckets([], bucket_bytes=limit)


LIMIT = 1024


def batches(cutter, named):
    return list(cutter.batches(iter(named), SyncReport(mode="compiled", replica=0)))


CHANGES = {  # of an export, at a place in it
    "none": lambda named, at: named,
    "name": lambda named, at: [*named[:at], ("other", named[at][1]), *named[at + 1 :]],
    "shape": lambda named, at: changed(named, at, lambda tensor: tensor[None]),
    "dtype": lambda named, at: changed(named, at, torch.Tensor.double),
    "less": lambda named, at: [*named[:at], *named[at + 1 :]],
    "more": lambda named, at: [*named[:at], ("more", torch.ones(3)), *named[at:]],
    "order": lambda named, at: [*named[at:], *named[:at]],
    "a part": lambda named, at: named[: at + 1],
}


def changed(named, at, change):
    name, tensor = named[at]
    return [*named[:at], (name, change(tensor)), *named[at + 1 :]]


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 400), min_size=2, max_size=30),
    st.sampled_from(list(CHANGES)),
    st.data(),
)
def test_a_known_export_is_cut_the_same(sizes, change, data):
    """Whoever sends the last bucket does not wait for its staging buffer; another one, called the
    last, would overwrite it.
    """
    named = [(f"t{i}", torch.ones(size)) for i, size in enumerate(sizes)]
    for place, fused in ((1, Q_A), (3, KV_A)):
        named[place : place + 1] = [(fused, tensor) for _, tensor in named[place : place + 1]]
    other = CHANGES[change](named, data.draw(st.integers(0, len(named) - 1)))
    cutter, found = BucketCutter(LIMIT), []
    exports = [named, named, other, other, other]
    for export in exports:
        found.append(batches(cutter, export))
        assert cutter.buckets == [batch.bucket for batch in found[-1]]
        sent = [
            (entry.name, tensor)
            for batch in found[-1]
            for entry, tensor in zip(batch.bucket.layout.tensors, batch.tensors, strict=True)
        ]
        assert len(dict(sent)) == len(sent) == len(export)
        assert all(tensor is dict(export)[name] for name, tensor in sent)
        assert not [batch.index for batch in found[-1][:-1] if batch.bucket.is_last]
    for first, again in ((0, 1), (3, 4)):
        specs = [(name, tensor.shape, tensor.dtype) for name, tensor in exports[first]]
        planned = plan_buckets(specs, bucket_bytes=LIMIT)
        for result in (found[first], found[again]):
            assert [batch.bucket.layout for batch in result] == planned
            assert [batch.index for batch in result] == list(range(len(planned)))
            assert result[-1].bucket.is_last
        assert all(a.bucket is b.bucket for a, b in zip(found[first], found[again], strict=True))


def test_only_the_consumer_holds_a_sent_bucket():
    tensors = [torch.ones(LIMIT // 4) for _ in range(3)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    named = ((f"t{i}", tensors.pop(0)) for i in range(3))
    cutter = BucketCutter(LIMIT)
    for batch in cutter.batches(named, SyncReport(mode="compiled", replica=0)):
        index = batch.index
        assert alive[index]() is not None
        del batch
        assert alive[index]() is None
