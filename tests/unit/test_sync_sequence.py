"""The order in which the buckets of a broadcast sync are accepted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_loader.common.broadcast.messages import BroadcastBucket
from sglang_loader.common.layout import BucketLayout, WireError, encode_layout
from sglang_loader.session.broadcast_receiver import SyncSequence


def bucket(index, *, sync="s", last=False, size=2, sent=None):
    """Bucket `index` of a sync whose buckets hold `size` tensors each."""
    layout = BucketLayout.pack((f"{index}.{i}", (0,), torch.int8) for i in range(size))
    return BroadcastBucket(
        sync_id=sync,
        index=index,
        is_last=last,
        num_tensors=size * (index + 1) if sent is None else sent,
        encoded_layout=encode_layout(layout),
        next_nbytes=0,
        timeout_s=1,
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
    with pytest.raises(WireError, match=message):
        sequence.accept(buckets[-1])


def test_a_sync_that_broke_off_is_replaced_by_a_new_one_and_cannot_go_on():
    sequence = SyncSequence()
    accept_all(sequence, bucket(0), bucket(1), bucket(0, sync="t"))
    with pytest.raises(WireError, match="expected bucket 1 of sync t"):
        sequence.accept(bucket(2))
    accept_all(sequence, bucket(1, sync="t", last=True))


def test_a_sync_that_is_over_does_not_begin_again():
    sequence = SyncSequence()
    accept_all(sequence, bucket(0), bucket(1, last=True), bucket(0, sync="t"))
    for sync in ("s", "t"):
        sequence.break_off()
        with pytest.raises(WireError, match=f"sync {sync} is over"):
            sequence.accept(bucket(0, sync=sync))


def test_a_new_sync_counts_its_tensors_from_zero():
    sequence = SyncSequence()
    accept_all(sequence, bucket(0), bucket(0, sync="t", size=5), bucket(1, sync="t", size=5))
    with pytest.raises(WireError, match="15 tensors had come, the trainer had sent 17"):
        sequence.accept(bucket(2, sync="t", size=5, sent=17))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("st")), max_size=12))
def test_a_finished_sync_had_every_bucket_once_in_order(steps):
    """Whatever is sent, the last bucket is only accepted right after all the ones before it."""
    sequence, accepted = SyncSequence(), []
    for index, sync in steps:
        try:
            sequence.accept(bucket(index, sync=sync, last=index == 3))
        except WireError:
            continue
        accepted.append((index, sync))
        if index == 3:
            assert accepted[-4:] == [(i, sync) for i in range(4)]
