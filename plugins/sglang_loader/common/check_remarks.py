"""Remarks of an engine that travel in the reply to a successful update.

SGLang appends words of its own to a reply's message, and joins the messages of its data-parallel
ranks. So each remark is a line of its own that begins with `REMARK`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

ManifestCheck = Literal["error", "off"]
"""error: a sync fails if its tensors do not fit the engine's model. off: nothing is checked."""

REMARK = "remark: "
SUCCESS = "Success"


def with_remarks(remarks: Iterable[str]) -> str:
    """Return the message of a successful update, with remarks of one line each."""
    lines = "".join(f"{REMARK}{remark}\n" for remark in remarks)
    return f"{SUCCESS}\n{lines}" if lines else SUCCESS


def remarks_in(message: str) -> list[str]:
    """Return the remarks of all data-parallel ranks, without repetitions."""
    lines = (line for line in message.splitlines() if line.startswith(REMARK))
    return list(dict.fromkeys(line.removeprefix(REMARK) for line in lines))
