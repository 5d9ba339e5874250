"""The content that we add to an engine's replies over HTTP.

Remarks travel in the message of the reply to a successful update. SGLang appends words of its own
to the message, and joins the messages of its data-parallel ranks. So each remark is a line of its
own that begins with `REMARK`.

Costs of a release or a resume of memory come by tag and TP rank. Bytes come from the allocators'
tables, not from readings of free memory: other processes change the free memory.

    costs = by_rank([{"weights": {"seconds": 0.1, ...}}, ...])      # gathered from all TP ranks
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

REMARK = "remark: "
SUCCESS = "Success"

Cost = dict[str, float]
"""The cost of one tag on one rank: "seconds", "gpu_bytes" that were unmapped or mapped, and
"host_bytes" that the host holds for the tag afterwards."""

StageCosts = dict[str, dict[str, list[float]]]
"""A list by TP rank, by tag and by key of `Cost`. Tags that needed no work are left out."""


def with_remarks(remarks: Iterable[str]) -> str:
    """Return the message of a successful update, with remarks of one line each."""
    lines = "".join(f"{REMARK}{remark}\n" for remark in remarks)
    return f"{SUCCESS}\n{lines}" if lines else SUCCESS


def remarks_in(message: str) -> list[str]:
    """Return the remarks of all data-parallel ranks, without repetitions."""
    lines = (line for line in message.splitlines() if line.startswith(REMARK))
    return list(dict.fromkeys(line.removeprefix(REMARK) for line in lines))


def by_rank(costs: Sequence[Mapping[str, Cost]]) -> StageCosts:
    """Join the costs of all TP ranks, which have the same tags."""
    return {
        tag: {kind: [rank[tag][kind] for rank in costs] for kind in costs[0][tag]}
        for tag in costs[0]
    }


def joined(replies: Sequence[StageCosts]) -> StageCosts:
    """Join the replies of data-parallel ranks."""
    # The lists of TP ranks are joined in the order of the replies.
    total: StageCosts = {}
    for reply in replies:
        for tag, kinds in reply.items():
            for kind, values in kinds.items():
                total.setdefault(tag, {}).setdefault(kind, []).extend(values)
    return total


def stage_costs_in(content: Any) -> StageCosts:
    """Return the costs in a reply over HTTP, or {} for a reply of SGLang's own, without costs."""
    stages = content.get("stages") if isinstance(content, dict) else None
    return stages if isinstance(stages, dict) else {}
