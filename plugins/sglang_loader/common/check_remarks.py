"""Remarks of an engine that travel in the reply to a successful update.

SGLang appends words of its own to a reply's message, and joins those of its data-parallel ranks, so
each remark is a line of its own that begins with `REMARK`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

ManifestCheck = Literal["error", "off"]
"""error: a sync fails if its tensors do not fit the engine's model. off: it is not checked."""

REMARK = "remark: "
SUCCESS = "Success"


def with_remarks(remarks: Iterable[str]) -> str:
    """The message of a successful update, with remarks of one line each."""
    lines = "".join(f"{REMARK}{remark}\n" for remark in remarks)
    return f"{SUCCESS}\n{lines}" if lines else SUCCESS


def remarks_in(message: str) -> list[str]:
    """The remarks of all data-parallel ranks, without repetitions."""
    lines = (line for line in message.splitlines() if line.startswith(REMARK))
    return list(dict.fromkeys(line.removeprefix(REMARK) for line in lines))
