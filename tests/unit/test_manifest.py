"""The wire format: round trip, refusal of everything malformed, and the order of a sync."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_loader.common.manifest import (
    WIRE_VERSION,
    BucketManifest,
    ManifestError,
    SyncSequence,
    TensorEntry,
    decode,
    encode,
)

ITEMSIZES = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "bool": 1, "int64": 8}


@st.composite
def manifests(draw):
    entries, end = [], 0
    for index in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from(sorted(ITEMSIZES)))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        offset = end + draw(st.integers(0, 300))
        nbytes = math.prod(shape) * ITEMSIZES[dtype]
        entries.append(TensorEntry(draw(st.text()) + str(index), dtype, shape, offset, nbytes))
        end = offset + nbytes
    return BucketManifest(
        version=WIRE_VERSION,
        sync_id=draw(st.text()),
        index=draw(st.integers(0, 1 << 31)),
        last=draw(st.booleans()),
        num_tensors=draw(st.integers(0, 1 << 31)),
        nbytes=end + draw(st.integers(0, 300)),
        tensors=tuple(entries),
    )


@settings(max_examples=200, deadline=None)
@given(manifests())
def test_round_trip(manifest):
    assert decode(encode(manifest)) == manifest


def valid():
    """A manifest as parsed JSON, with a tensor before, one in the middle and an empty one."""
    return {
        "version": WIRE_VERSION,
        "sync_id": "abc",
        "index": 3,
        "last": False,
        "num_tensors": 9,
        "nbytes": 1024,
        "tensors": [
            ["model.first.weight", "float32", [8, 4], 0, 128],
            ["model.second.weight", "bfloat16", [4], 256, 8],
            ["model.empty.weight", "bool", [0, 4], 512, 0],
        ],
    }


def test_the_manifest_that_the_cases_below_break_is_itself_accepted():
    assert encode(decode(json.dumps(valid()))) == json.dumps(valid(), separators=(",", ":"))


FIRST, SECOND, EMPTY = 0, 1, 2


def entry(index, **changes):
    """A case that changes fields of one tensor entry."""
    fields = ("name", "dtype", "shape", "offset", "nbytes")

    def change(manifest):
        for field, value in changes.items():
            manifest["tensors"][index][fields.index(field)] = value

    return change


def top(**changes):
    """A case that changes or adds top-level fields."""
    return lambda manifest: manifest.update(changes)


def without(field):
    return lambda manifest: manifest.pop(field)


MALFORMED = {
    "other version": (top(version=WIRE_VERSION + 1), "wire version 2, this loader speaks 1"),
    "unknown field": (top(checksum=1), "unknown field `checksum`"),
    **{f"no {key}": (without(key), f"missing required field `{key}`") for key in valid()},
    "version is text": (top(version="1"), r"Expected `int`, got `str`.*version"),
    "index is a float": (top(index=1.5), r"Expected `int`, got `float`.*index"),
    "last is a number": (top(last=1), r"Expected `bool`, got `int`.*last"),
    "sync_id is null": (top(sync_id=None), r"Expected `str`, got `null`.*sync_id"),
    "tensors is an object": (top(tensors={}), r"Expected `array`, got `object`.*tensors"),
    "tensor entry is an object": (
        lambda m: m["tensors"].append({"name": "x"}),
        r"Expected `array`, got `object`.*tensors\[",
    ),
    "entry too short": (lambda m: m["tensors"][0].pop(), "at least length 5"),
    "entry too long": (lambda m: m["tensors"][0].append(1), "at most length 5"),
    "name is a number": (entry(FIRST, name=1), "Expected `str`, got `int`"),
    "dimension is text": (entry(FIRST, shape=["8", 4]), "Expected `int`, got `str`"),
    "overlap with the one before": (entry(SECOND, offset=127), "'model.second.weight'.*overlaps"),
    "out of order": (entry(FIRST, offset=512), "'model.second.weight'.*overlaps"),
    "beyond the end": (entry(SECOND, offset=1020), "'model.second.weight'.*leaves the 1024 bytes"),
    "negative offset": (entry(FIRST, offset=-4), "'model.first.weight' at bytes -4"),
    "size not of shape": (entry(SECOND, nbytes=7), "'model.second.weight': 7 bytes do not hold"),
    "negative dimensions": (entry(FIRST, shape=[-8, -4]), r"first.*do not hold shape \(-8, -4\)"),
    "one negative dimension": (entry(SECOND, shape=[-4]), r"second.*do not hold shape \(-4,\)"),
    "negative size": (entry(SECOND, nbytes=-8), "'model.second.weight': -8 bytes do not hold"),
    "negative size of an empty tensor": (
        entry(EMPTY, nbytes=-8),
        "'model.empty.weight': -8 bytes do not hold",
    ),
    "empty tensor with bytes": (entry(EMPTY, nbytes=16), "'model.empty.weight': 16 bytes do not"),
    "full tensor without bytes": (entry(SECOND, nbytes=0), "'model.second.weight': 0 bytes do not"),
}


@pytest.mark.parametrize(("change", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_manifests_are_refused_by_name(change, message):
    manifest = valid()
    change(manifest)
    with pytest.raises(ManifestError, match=message):
        decode(json.dumps(manifest))


@pytest.mark.parametrize(
    "text", ("", "null", "[]", "{", "model.norm.weight", encode(decode(json.dumps(valid())))[:-1])
)
def test_text_that_is_no_manifest_is_refused_and_quoted(text):
    with pytest.raises(ManifestError, match="not a bucket manifest") as error:
        decode(text)
    assert repr(text[:120]) in str(error.value)


def bucket(index, *, sync="s", last=False, size=2, sent=None):
    """Bucket `index` of a sync whose buckets hold `size` tensors each."""
    return BucketManifest(
        version=WIRE_VERSION,
        sync_id=sync,
        index=index,
        last=last,
        num_tensors=size * (index + 1) if sent is None else sent,
        nbytes=0,
        tensors=tuple(TensorEntry(f"{index}.{i}", "int8", (0,), 0, 0) for i in range(size)),
    )


def accept_all(sequence, *buckets):
    for item in buckets:
        sequence.accept(item)


def test_a_whole_sync_and_the_next_one_are_accepted():
    sequence = SyncSequence()
    accept_all(sequence, bucket(0), bucket(1), bucket(2, last=True))
    accept_all(sequence, bucket(0, sync="t"), bucket(1, sync="t", last=True))
    accept_all(sequence, bucket(0, sync="u", last=True))


REFUSED_ORDERS = {
    "starts late": ([bucket(1)], "got bucket 1 of sync s, expected bucket 0 of a new sync"),
    "gap": ([bucket(0), bucket(2)], "got bucket 2 of sync s, expected bucket 1 of sync s"),
    "repeat": (
        [bucket(0), bucket(1), bucket(1)],
        "got bucket 1 of sync s, expected bucket 2 of sync s",
    ),
    "repeat of the first": (
        [bucket(0), bucket(0)],
        "got bucket 0 of sync s, expected bucket 1 of sync s",
    ),
    "back to the first": (
        [bucket(0), bucket(1), bucket(0)],
        "got bucket 0 of sync s, expected bucket 2 of sync s",
    ),
    "foreign sync": (
        [bucket(0), bucket(1, sync="t")],
        "got bucket 1 of sync t, expected bucket 1 of sync s",
    ),
    "after the last": (
        [bucket(0), bucket(1, last=True), bucket(2)],
        "got bucket 2 of sync s, expected bucket 0 of a new sync",
    ),
    "tensors lost": (
        [bucket(0), bucket(1, sent=5)],
        "after bucket 1 of sync s 4 tensors had come, the trainer had sent 5",
    ),
    "tensors too many": ([bucket(0, sent=1)], "2 tensors had come, the trainer had sent 1"),
}


@pytest.mark.parametrize(("buckets", "message"), REFUSED_ORDERS.values(), ids=REFUSED_ORDERS.keys())
def test_wrong_orders_are_refused(buckets, message):
    sequence = SyncSequence()
    accept_all(sequence, *buckets[:-1])
    with pytest.raises(ManifestError, match=message):
        sequence.accept(buckets[-1])


def test_a_sync_that_broke_off_is_replaced_by_a_new_one_and_cannot_go_on():
    sequence = SyncSequence()
    accept_all(sequence, bucket(0), bucket(1), bucket(0, sync="t"))
    with pytest.raises(ManifestError, match="expected bucket 1 of sync t"):
        sequence.accept(bucket(2))
    accept_all(sequence, bucket(1, sync="t", last=True))


def test_a_sync_that_is_over_does_not_begin_again():
    sequence = SyncSequence()
    accept_all(sequence, bucket(0), bucket(1, last=True), bucket(0, sync="t"))
    for sync in ("s", "t"):
        sequence.break_off()
        with pytest.raises(ManifestError, match=f"sync {sync} is over"):
            sequence.accept(bucket(0, sync=sync))


def test_a_new_sync_counts_its_tensors_from_zero():
    sequence = SyncSequence()
    accept_all(sequence, bucket(0), bucket(0, sync="t", size=5), bucket(1, sync="t", size=5))
    with pytest.raises(ManifestError, match="15 tensors had come, the trainer had sent 17"):
        sequence.accept(bucket(2, sync="t", size=5, sent=17))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("st")), max_size=12))
def test_a_finished_sync_had_every_bucket_once_in_order(steps):
    """Whatever is sent, the last bucket is only accepted right after all the ones before it."""
    sequence, accepted = SyncSequence(), []
    for index, sync in steps:
        try:
            sequence.accept(bucket(index, sync=sync, last=index == 3))
        except ManifestError:
            continue
        accepted.append((index, sync))
        if index == 3:
            assert accepted[-4:] == [(i, sync) for i in range(4)]
