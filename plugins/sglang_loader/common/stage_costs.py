"""What a release or a resume of memory cost: by tag, and by TP rank.

Bytes come from the allocators' tables, not from readings of free memory, which other processes
change: two runs of the same steps give the same numbers.

    meter = StageMeter(gpu_bytes=..., host_bytes=...)
    with meter.step("weights"):
        ...                                  # release or resume it
    costs = by_rank([meter.costs, ...])      # gathered from all TP ranks
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

Cost = dict[str, float]
"""Of one tag on one rank: "seconds", "gpu_bytes" unmapped or mapped, "host_bytes" that the host
holds for the tag after the step."""

StageCosts = dict[str, dict[str, list[float]]]
"""By tag and then as in `Cost`, a list by TP rank. Tags for which nothing was to be done are not
in it."""


class StageMeter:
    """Measures the steps of one request on one rank: `gpu_bytes` tells the device memory that
    belongs to a tag, mapped or not, and `host_bytes` what the host holds for it now.
    """

    def __init__(
        self, *, gpu_bytes: Callable[[str], int], host_bytes: Callable[[str], int]
    ) -> None:
        self.gpu_bytes = gpu_bytes
        self._host_bytes = host_bytes
        self.costs: dict[str, Cost] = {}

    @contextmanager
    def step(self, tag: str) -> Iterator[None]:
        """Count the body for `tag`; several bodies add up."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        before = self.costs.get(tag, {"seconds": 0.0})["seconds"]
        self.costs[tag] = {
            "seconds": before + seconds,
            "gpu_bytes": self.gpu_bytes(tag),
            "host_bytes": self._host_bytes(tag),
        }


def by_rank(costs: Sequence[Mapping[str, Cost]]) -> StageCosts:
    """Join the costs of all ranks, which all did the same steps."""
    return {
        tag: {kind: [rank[tag][kind] for rank in costs] for kind in costs[0][tag]}
        for tag in costs[0]
    }


def joined(replies: Sequence[StageCosts]) -> StageCosts:
    """Join what several groups of ranks replied (data parallelism)."""
    total: StageCosts = {}
    for reply in replies:
        for tag, kinds in reply.items():
            for kind, values in kinds.items():
                total.setdefault(tag, {}).setdefault(kind, []).extend(values)
    return total


def stage_costs_in(content: Any) -> StageCosts:
    """The costs in a reply over HTTP; none where the engine told of none, as SGLang's own."""
    stages = content.get("stages") if isinstance(content, dict) else None
    return stages if isinstance(stages, dict) else {}
