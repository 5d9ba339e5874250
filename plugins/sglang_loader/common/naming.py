"""Lists of tensors' names in messages."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAMED = 20


def listed(found: Sequence[str]) -> str:
    """Names in one line, `MAX_NAMED` of them at most."""
    more = f", and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return ", ".join(found[:MAX_NAMED]) + more
