"""Remarks of the manifest check, as they travel in the reply to a successful update.

SGLang appends words of its own to a reply's message, and joins those of its data-parallel ranks, so
each remark is a line of its own that begins with `REMARK`.
"""

from __future__ import annotations

from typing import Literal

ManifestCheck = Literal["error", "warn", "off"]
"""Whether a sync whose tensors do not fit the engine's model fails, or is only reported."""

REMARK = "manifest check: "
SUCCESS = "Success"


def with_remark(remark: str) -> str:
    """The message of a successful update, with a remark unless that is empty."""
    return f"{SUCCESS}\n{REMARK}{remark}\n" if remark else SUCCESS


def remarks_in(message: str) -> list[str]:
    """The remarks of all data-parallel ranks, without repetitions."""
    lines = (line for line in message.splitlines() if line.startswith(REMARK))
    return list(dict.fromkeys(line.removeprefix(REMARK) for line in lines))
