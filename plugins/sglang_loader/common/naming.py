"""Lists of tensors' names in messages."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAMED = 20


def listed(names: Sequence[str]) -> str:
    """Join names in one line. At most `MAX_NAMED` names are listed, the others are counted."""
    more = f", and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
