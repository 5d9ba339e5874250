"""The stream cache: same buckets as the planner's, and a new plan on a change."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.bucket_plans import plan_buckets
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.sources.bucket_stream import BucketStream

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
    specs = [(name, tensor.shape, tensor.dtype) for name, tensor in weights(sizes)]
    planned = plan_buckets(specs, bucket_bytes=LIMIT)
    for result in (first, again):
        assert [batch.bucket.layout for batch in result] == planned
        assert [batch.index for batch in result] == list(range(len(planned)))
        assert [batch.bucket.is_last for batch in result] == [False] * (len(planned) - 1) + [True]
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


@given(st.lists(st.integers(0, 400), min_size=2, max_size=30), st.data())
def test_no_bucket_but_the_last_is_called_the_last(sizes, data):
    """Whoever sends it does not wait for its staging buffer; another bucket would overwrite it."""
    named = weights(sizes)
    stream = BucketStream(LIMIT)
    batches(stream, named[: data.draw(st.integers(1, len(named)))])
    result = batches(stream, named)
    assert not [batch.index for batch in result[:-1] if batch.bucket.is_last]
