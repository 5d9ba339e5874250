"""The optimizer steps of this process, by which a sync notices that weights are being written.

    OPTIMIZER_STEPS.watch()             # from here on
    before = OPTIMIZER_STEPS.count()
    OPTIMIZER_STEPS.require_none_since(before)

torch's own counts of writes (`Tensor._version`) stay the same in an optimizer's step on sharded
parameters.
"""

from __future__ import annotations

import threading
from typing import Any

from torch.optim import optimizer

from verl_sglang_sync.sources.snapshot import SourcesChanged


class OptimizerSteps:
    """The steps of all of torch's optimizers in this process. See the module."""

    def __init__(self) -> None:
        self._is_watching = False
        self._num_begun = self._num_ended = 0
        self._running: set[int] = set()  # the threads

    def watch(self) -> None:
        """Count all steps from here on. Only the first call does something."""
        if not self._is_watching:
            self._is_watching = True
            optimizer.register_optimizer_step_pre_hook(self._begin)
            optimizer.register_optimizer_step_post_hook(self._end)

    def count(self) -> tuple[int, int]:
        """Return how many steps have begun and ended."""
        return self._num_begun, self._num_ended

    def require_none_since(self, before: tuple[int, int]) -> None:
        """Check that no step has run since a count.

        Raises:
            SourcesChanged: one has begun or ended since then, or runs in another thread.
        """
        others = self._running - {threading.get_ident()}
        # A step that has failed does not end. Its thread may have ended.
        is_running = others and others & {thread.ident for thread in threading.enumerate()}
        if self.count() != before or is_running:
            raise SourcesChanged("an optimizer has written the parameters while engines read them")

    def _begin(self, *_: Any) -> None:
        self._num_begun += 1
        self._running.add(threading.get_ident())

    def _end(self, *_: Any) -> None:
        self._num_ended += 1
        self._running.discard(threading.get_ident())


OPTIMIZER_STEPS = OptimizerSteps()
