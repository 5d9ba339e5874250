"""Whether a model's weights are those of one complete sync.

A sync that failed has left new bytes beside old ones. What ends that is a sync which brings every
tensor that any sync has brought to this engine; one that brings fewer, or none, does not.

    state.loading(layout)        # before each bucket is loaded
    state.fail()                 # the sync has failed, or broke off
    state.missing()              # at its end: what keeps the weights from being complete
    state.complete()
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_loader.common.layout import BucketLayout


class Completeness:
    """Of one model; see the module.

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
        """A sync has begun that is not complete."""
        return self.is_broken or bool(self._layouts)

    @property
    def layouts(self) -> tuple[BucketLayout, ...]:
        """The buckets of the sync in progress."""
        return tuple(self._layouts)

    def loading(self, layout: BucketLayout) -> None:
        """A bucket is about to be loaded."""
        self._layouts.append(layout)

    def fail(self) -> None:
        """The sync in progress will not be completed."""
        self.is_broken = True
        self._required |= _names(self._layouts)
        self._layouts = []

    def missing(self) -> list[str]:
        """Tensors that syncs have brought before, and this one has not; empty if all is well."""
        return sorted(self._required - _names(self._layouts)) if self.is_broken else []

    def complete(self) -> None:
        """The sync in progress has brought all."""
        if self.is_broken:
            self._required, self._complete = set(), []
        if self._layouts != self._complete:  # rarely: 18,867 names are gathered once
            self._required |= _names(self._layouts)
        self._complete, self._layouts = self._layouts, []
        self.is_broken, self.has_completed = False, True


def _names(layouts: Iterable[BucketLayout]) -> set[str]:
    return {tensor.name for layout in layouts for tensor in layout.tensors}
