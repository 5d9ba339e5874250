"""What the reply to a good update tells beside its success: of the manifest check, and how a
broadcast was loaded; both sides.

SGLang appends words of its own to a reply's message, and joins those of its data-parallel ranks, so
each of these is a line of its own that begins with `REMARK` or `LOADED`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ManifestCheck = Literal["error", "warn", "off"]
"""What becomes of a sync whose tensors do not fit the engine's model, or are not all of it."""

REMARK = "manifest check: "
LOADED = "loaded: "
SUCCESS = "Success"


class LoadCounts(msgspec.Struct, frozen=True):
    """How the buckets of a sync were loaded.

    Attributes:
        num_replayed: by the load plan.
        num_eager: by `load_weights`.
        reason: why some were eager; None where all were replayed.
    """

    num_replayed: int
    num_eager: int
    reason: str | None


def with_remark(remark: str, loaded: LoadCounts | None = None) -> str:
    """The message of a good update; "" and None: nothing is to be said."""
    lines = [f"{REMARK}{remark}"] if remark else []
    if loaded is not None:
        lines.append(LOADED + msgspec.json.encode(loaded).decode())
    return SUCCESS + "".join(f"\n{line}\n" for line in lines)


def remarks_in(message: str) -> list[str]:
    """The remarks of all data-parallel ranks, each once."""
    return _lines_of(message, REMARK)


def loaded_in(message: str) -> list[LoadCounts]:
    """How all data-parallel ranks have loaded, as far as they tell; equal ones once."""
    return [msgspec.json.decode(line, type=LoadCounts) for line in _lines_of(message, LOADED)]


def _lines_of(message: str, kind: str) -> list[str]:
    lines = (line for line in message.splitlines() if line.startswith(kind))
    return list(dict.fromkeys(line.removeprefix(kind) for line in lines))
