"""A model's weights are complete after a sync that is known to have brought all of them."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_loader.common.layout import BucketLayout
from sglang_loader.host_backup.completeness import Completeness

FAILS, COMPLETE, PROVEN = "fails", "is complete", "is proven to be complete"
BUCKETS = st.lists(st.frozensets(st.sampled_from("abc"), min_size=1), max_size=2)
SYNCS = st.lists(st.tuples(BUCKETS, st.sampled_from([FAILS, COMPLETE, PROVEN])), max_size=6)
"""The tensors of each bucket, and how the sync ends: the hooks complete one with missing tensors
where the check finds that it is whole.
"""


def layout(names):
    return BucketLayout.pack([(name, (1,), torch.uint8) for name in sorted(names)])


@given(SYNCS)
@example([(["abc"], FAILS), (["ab"], PROVEN), ([], FAILS), (["ab"], COMPLETE)])
@example([(["a"], COMPLETE), ([], FAILS), (["a"], COMPLETE), ([], FAILS), ([], COMPLETE)])
@settings(max_examples=300)
def test_after_a_failure_completeness_needs_everything(syncs):
    state, ever, is_good, has_completed = Completeness(), frozenset[str](), True, False
    for buckets, end in syncs:
        brought = frozenset[str]().union(*buckets)
        for number, names in enumerate(buckets):
            assert state.is_half_written == (not is_good or number > 0)
            state.begin_bucket(layout(names))
        assert state.layouts == tuple(map(layout, buckets))
        assert state.missing() == ([] if is_good else sorted(ever - brought))
        if end == FAILS or (end == COMPLETE and state.missing()):
            state.fail()
            ever, is_good = ever | brought, False
        else:
            state.complete()
            ever = ever | brought if is_good else brought
            is_good = has_completed = True
        assert state.is_half_written == state.is_broken == (not is_good)
        assert (state.layouts, state.has_completed) == ((), has_completed)
