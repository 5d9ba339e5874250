"""One line of the doctor's report."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Outcome of a check, from good to bad."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """What was looked at and what came of it.

    Attributes:
        name: short and stable, such as "verl plugin"; scripts select by it.
        status: a failure means that a recipe with `+weight_sync=...` cannot be relied on here.
        detail: what was found.
        advice: what to do about it; empty where nothing is to be done.
    """

    name: str
    status: Status
    detail: str
    advice: str = ""


def passed(name: str, detail: str) -> Check:
    """A check that found what it should."""
    return Check(name, Status.OK, detail)


def warned(name: str, detail: str, advice: str = "") -> Check:
    """A check that found something worth knowing."""
    return Check(name, Status.WARN, detail, advice)


def failed(name: str, detail: str, advice: str = "") -> Check:
    """A check that found something broken."""
    return Check(name, Status.FAIL, detail, advice)


def worst(checks: Iterable[Check]) -> Status:
    """The status of the whole report."""
    order = list(Status)
    return max((check.status for check in checks), key=order.index, default=Status.OK)


def guarded(name: str, look: Callable[[], list[Check]]) -> list[Check]:
    """Run some checks; if they themselves break, that is a failed check, not the report's end."""
    try:
        return look()
    except Exception as error:
        reason = last_line(traceback.format_exc())
        return [failed(name, f"could not be checked: {reason}", str(error))]


def last_line(text: str) -> str:
    """The last line of a traceback or a log that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
