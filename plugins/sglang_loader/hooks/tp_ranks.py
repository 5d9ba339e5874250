"""The TP ranks of an engine, which execute one request together.

    ranks = TPRanks(updater)
    _, failure = run_step(step)               # an exception ends no process
    if failures := ranks.failures(failure):   # the same list on all ranks
        ...

Each rank must make the same calls in the same order: they are collective.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from sglang_loader.common.object_gather import gather_objects
from sglang_loader.common.ranks import Ranks, Turn

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class TPRanks(Ranks):
    """The TP ranks of one engine. See the module.

    Args:
        updater: SGLang's `SchedulerWeightUpdaterManager` on this rank.
    """

    name = "TP rank"

    def __init__(self, updater: Any) -> None:
        super().__init__()
        self._group = updater.tp_cpu_group

    @property
    def rank(self) -> int:
        return torch.distributed.get_rank(group=self._group)

    @property
    def size(self) -> int:
        """The number of TP ranks."""
        return torch.distributed.get_world_size(group=self._group)

    def _exchange(self, turn: Turn) -> list[Turn]:
        if self.size == 1:
            return [turn]
        all_gather = partial(torch.distributed.all_gather, group=self._group)
        return gather_objects(turn, self.size, all_gather)

    def failures(self, failure: str | None) -> list[str]:
        """Return the failures of all ranks, each with its rank. `failure`: this rank's, or None."""
        return [text for text in self.gather(self.named(failure)) if text]

    def named(self, failure: str | None) -> str | None:
        """Return a failure of this rank with its rank. None stays None."""
        return f"{self.name} {self.rank}: {failure}" if failure else None


def run_step(step: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """Return the step's result, or the traceback of what the step raised."""
    try:
        return step(), None
    except Exception:
        failure = traceback.format_exc()
        logger.error("a request failed on this TP rank: %s", failure)
        return None, failure
