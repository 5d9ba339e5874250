"""A record of whether a model's weights are those of one complete sync.

A failed sync leaves new bytes beside old ones. Only a sync that brings every tensor that any sync
has brought to this engine makes the weights complete again.

    state.begin_bucket(layout)   # before each bucket is loaded
    state.fail()                 # the sync has failed, or broke off
    state.missing()              # at the end of a sync: the tensors that the sync lacks
    state.complete()
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_loader.common.layout import BucketLayout


class Completeness:
    """The state of one model's weights. See the module.

    Attributes:
        is_broken: a sync has failed since the last complete one.
        has_completed: there was a complete sync.
    """

    def __init__(self) -> None:
        self.is_broken = self.has_completed = False
        self._layouts: list[BucketLayout] = []  # of the sync in progress
        self._complete: list[BucketLayout] = []  # of the last complete one
        self._required: set[str] = set()

    @property
    def is_half_written(self) -> bool:
        """True if a sync has begun and is not complete."""
        return self.is_broken or bool(self._layouts)

    @property
    def layouts(self) -> tuple[BucketLayout, ...]:
        """The buckets of the sync in progress."""
        return tuple(self._layouts)

    def begin_bucket(self, layout: BucketLayout) -> None:
        """Record a bucket. Call this before the bucket is loaded."""
        self._layouts.append(layout)

    def fail(self) -> None:
        """End the sync in progress, which has failed."""
        self.is_broken = True
        self._required |= _names(self._layouts)
        self._layouts = []

    def missing(self) -> list[str]:
        """Return the tensors that earlier syncs have brought and this sync has not.

        Without a failed sync the list is empty.
        """
        return sorted(self._required - _names(self._layouts)) if self.is_broken else []

    def complete(self) -> None:
        """End the sync in progress, which has brought every tensor."""
        # After a failed sync the caller has judged this one complete. It alone counts from here on.
        if self.is_broken:
            self._required, self._complete = set(), []
        if self._layouts != self._complete:  # rarely: 18,867 names are gathered once
            self._required |= _names(self._layouts)
        self._complete, self._layouts = self._layouts, []
        self.is_broken, self.has_completed = False, True


def _names(layouts: Iterable[BucketLayout]) -> set[str]:
    return {tensor.name for layout in layouts for tensor in layout.tensors}
