"""A model's weights are complete after a sync that is known to have brought all of them."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_loader.common.layout import BucketLayout
from sglang_loader.host_backup.completeness import Completeness


def layout(names):
    return BucketLayout.pack([(name, (1,), torch.uint8) for name in sorted(names)])


def load(state, *buckets):
    for names in buckets:
        state.begin_bucket(layout(frozenset(names)))


def test_a_sync_is_half_written_from_its_first_bucket_to_its_end():
    state = Completeness()
    assert not state.is_half_written
    load(state, "ab", "c")
    assert state.is_half_written
    assert state.layouts == (layout(frozenset("ab")), layout(frozenset("c")))
    state.complete()
    assert not state.is_half_written
    assert state.has_completed
    assert state.layouts == ()


def test_what_a_proven_sync_did_not_bring_is_not_asked_for_again():
    """The hooks complete a sync with missing tensors where the check finds that it is whole."""
    state = Completeness()
    load(state, "abc")
    state.fail()
    load(state, "ab")
    state.complete()
    state.fail()
    load(state, "ab")
    assert state.missing() == []


@given(st.lists(st.tuples(st.lists(st.frozensets(st.sampled_from("abc"))), st.booleans())))
def test_after_a_failure_only_all_that_came_before_makes_the_weights_complete(syncs):
    state, ever, is_good = Completeness(), frozenset[str](), True
    for buckets, fails in syncs:
        brought = frozenset[str]().union(*buckets)
        for names in buckets:
            state.begin_bucket(layout(names))
        if is_good:
            assert state.missing() == []
        else:
            assert state.missing() == sorted(ever - brought)
        if fails or state.missing():
            state.fail()
            ever, is_good = ever | brought, False
        else:
            state.complete()
            ever = brought if not is_good else ever | brought
            is_good = True
        assert state.is_half_written == state.is_broken == (not is_good)
