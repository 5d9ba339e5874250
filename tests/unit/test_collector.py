"""During a sync Python collects what is young, and does not go through the whole process."""

import gc
import weakref

from sglang_loader.common.collector import no_full_collections


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
