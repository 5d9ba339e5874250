"""What a release or a resume of memory cost: by tag, and by TP rank.

Bytes come from the allocators' tables, not from readings of free memory, which other processes
change: two runs of the same steps give the same numbers.

    costs = by_rank([{"weights": {"seconds": 0.1, ...}}, ...])      # gathered from all TP ranks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Cost = dict[str, float]
"""Of one tag on one rank: "seconds", "gpu_bytes" unmapped or mapped, "host_bytes" that the host
holds for the tag after the step."""

StageCosts = dict[str, dict[str, list[float]]]
"""By tag and then as in `Cost`, a list by TP rank. Tags for which nothing was to be done are not
in it."""


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
