"""During a sync Python collects what is young, and does not go through the whole process."""

import gc
import weakref
from contextlib import ExitStack

import pytest

from sglang_loader.common.garbage_collection import no_full_collections


class Cycle:
    def __init__(self):
        self.itself = self


def test_only_young_cycles_are_visited_and_freed():
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


@pytest.mark.parametrize("before", [(700, 10, 10), (0, 10, 10)])
@pytest.mark.parametrize("meanwhile", [None, (5000, 20, 50), (0, 10, 10)])
def test_settings_survive_a_failed_sync(before, meanwhile, thresholds):
    gc.set_threshold(*before)
    with pytest.raises(OSError), no_full_collections():
        gc.set_threshold(*meanwhile or gc.get_threshold())
        raise OSError
    assert gc.get_threshold() == (meanwhile or before)
