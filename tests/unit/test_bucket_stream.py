"""The stream cache: same buckets as the planner's, and a new plan on a change."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_sglang_sync.bucket_stream import BucketStream
from verl_sglang_sync.planner import plan_buckets
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.staging import spec_of
from verl_sglang_sync.weight_sync import ExportChanged

LIMIT = 1024
FUSED = ("l.self_attn.q_a_proj.weight", "l.self_attn.kv_a_proj_with_mqa.weight")


def weights(sizes, dtype=torch.float32):
    return [(f"t{i}", torch.full((size,), float(i), dtype=dtype)) for i, size in enumerate(sizes)]


def batches(stream, named):
    report = SyncReport(mode="compiled", replica=0)
    result = list(stream.batches(iter(named), report))
    assert report.num_tensors == sum(len(batch.tensors) for batch in result)
    return result


def described(result):
    return [
        [
            (entry.name, entry.shape, entry.dtype, entry.offset, tensor.tolist())
            for entry, tensor in zip(batch.bucket.layout.tensors, batch.tensors, strict=True)
        ]
        for batch in result
    ]


@given(st.lists(st.integers(0, 400), min_size=1, max_size=30))
def test_a_known_stream_is_cut_as_the_planner_cuts_it(sizes):
    stream = BucketStream(LIMIT)
    first, again = batches(stream, weights(sizes)), batches(stream, weights(sizes))
    planned = plan_buckets([spec_of(*pair) for pair in weights(sizes)], bucket_bytes=LIMIT)
    for result in (first, again):
        assert [
            [(entry.name, entry.offset) for entry in batch.bucket.layout.tensors]
            for batch in result
        ] == [[(slot.spec.name, slot.offset) for slot in plan.slots] for plan in planned]
        assert [batch.index for batch in result] == list(range(len(planned)))
    assert described(first) == described(again)
    assert all(a.bucket is b.bucket for a, b in zip(first, again, strict=True))


def change(named, kind):
    changed = list(named)
    name, tensor = changed[5]
    if kind == "name":
        changed[5] = ("other", tensor)
    elif kind == "shape":
        changed[5] = (name, tensor.reshape(2, -1))
    elif kind == "dtype":
        changed[5] = (name, tensor.double())
    elif kind == "one less":
        del changed[-1]
    elif kind == "one more":
        changed.append(("more", torch.ones(3)))
    elif kind == "order":
        changed[5], changed[6] = changed[6], changed[5]
    return changed


@pytest.mark.parametrize("kind", ("name", "shape", "dtype", "one less", "one more", "order"))
def test_a_changed_stream_is_planned_anew_and_loses_nothing(kind):
    stream = BucketStream(LIMIT)
    named = weights([100] * 12)
    batches(stream, named)
    changed = change(named, kind)
    for _ in range(3):
        result = batches(stream, changed)
        sent = [entry.name for batch in result for entry in batch.bucket.layout.tensors]
        assert sent == [name for name, _ in changed]
        for batch in result:
            for entry, tensor in zip(batch.bucket.layout.tensors, batch.tensors, strict=True):
                assert tensor is dict(changed)[entry.name]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("name", "tensor 5 of the export is other torch.float32 [100], its manifest has t5 "),
        ("shape", "tensor 5 of the export is t5 torch.float32 [2, 50], its manifest has t5 "),
        ("dtype", "tensor 5 of the export is t5 torch.float64 [100], its manifest has t5 "),
        ("order", "tensor 5 of the export is t6 torch.float32 [100], its manifest has t5 "),
        ("one less", "tensor 11 of the export is none, its manifest has t11 "),
        ("one more", "tensor 12 of the export is more torch.float32 [3], its manifest has none"),
    ],
)
def test_a_change_of_an_announced_stream_is_an_error_before_its_bucket(kind, said):
    stream = BucketStream(LIMIT)
    named = weights([100] * 12)
    batches(stream, named)
    report, sent = SyncReport(mode="compiled", replica=0), []
    list(stream.batches(iter(named), report, announced=True))
    with pytest.raises(ExportChanged, match=re.escape(said)):
        for batch in stream.batches(iter(change(named, kind)), report, announced=True):
            sent += [entry.name for entry in batch.bucket.layout.tensors]
    unchanged = [name for (name, _), (other, _) in zip(named, change(named, kind), strict=False)]
    assert sent == unchanged[: len(sent)]
    assert "t5" not in sent or kind.startswith("one")
    assert stream.cuts == []


def test_a_fusion_group_stays_together_in_both_ways():
    named = [*weights([200, 200]), (FUSED[0], torch.ones(100)), ("between", torch.ones(100))]
    named.append((FUSED[1], torch.ones(100)))
    stream = BucketStream(LIMIT)
    for _ in range(2):
        result = batches(stream, named)
        holders = [
            batch.index
            for batch in result
            for entry in batch.bucket.layout.tensors
            if entry.name in FUSED
        ]
        assert len(holders) == 2
        assert len(set(holders)) == 1
