"""During a sync Python collects what is young, and does not go through the whole process."""

import gc
import weakref
from contextlib import ExitStack

import pytest

from sglang_loader.common.garbage_collection import no_full_collections


class Cycle:
    def __init__(self):
        self.itself = self


def test_young_cycles_are_freed_and_nothing_else_is_looked_at():
    seen, before = [], gc.get_threshold()

    def note(phase, info):
        seen.append(info["generation"])

    gc.callbacks.append(note)
    try:
        with no_full_collections():
            freed = weakref.ref(Cycle())
            kept = [[number] for number in range(1_000_000)]
        during, kept = set(seen), [[number] for number in range(1_000_000)]
    finally:
        gc.callbacks.remove(note)
    assert during == {0, 1} and freed() is None
    assert 2 in seen, f"without it {len(kept)} objects are enough for a full one"
    assert gc.get_threshold() == before


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("first", (0, 1))
def test_syncs_of_two_threads_leave_full_collections_on(first, thresholds):
    syncs = [ExitStack(), ExitStack()]
    for sync in syncs:
        sync.enter_context(no_full_collections())
    for sync in (syncs[first], syncs[1 - first]):
        sync.close()
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("meanwhile", [(5000, 20, 50), (0, 10, 10)])
def test_what_others_set_during_a_sync_stays(meanwhile, thresholds):
    with no_full_collections():
        gc.set_threshold(*meanwhile)
    assert gc.get_threshold() == meanwhile


def test_a_failed_sync_and_a_user_without_collections_get_back_what_was(thresholds):
    gc.set_threshold(0, 10, 10)
    with pytest.raises(OSError), no_full_collections():
        raise OSError
    assert gc.get_threshold() == (0, 10, 10)
