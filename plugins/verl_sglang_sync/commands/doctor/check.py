"""The result of a check, and probes: functions that run in a new process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

PROBE_TIMEOUT_S = 300.0
STDERR_CHARS = 4000
RUN_PROBE = """
import pickle, sys
probe, arguments = pickle.loads(bytes.fromhex(sys.argv[1]))
sys.stdout.write("\\n" + pickle.dumps(probe(*arguments)).hex() + "\\n")
"""

Facts = TypeVar("Facts")


class Status(StrEnum):
    """Result of a check, the best first."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


OK, WARN, FAIL = Status


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: short name such as "verl plugin". Scripts select by it, so names do not change.
        status: FAIL means that a recipe with `+weight_sync=...` cannot be relied on here.
        detail: what was found.
        advice: what to do, or "" if there is nothing to do.
    """

    name: str
    status: Status
    detail: str
    advice: str = ""


class ProbeError(RuntimeError):
    """The end of a probe's process without a result. The message has the end of its stderr."""


def run_probe(
    probe: Callable[..., Facts],
    environment: Mapping[str, str] | None = None,
    *arguments: object,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> Facts:
    """Call a function of a module in a new process, and return its result.

    Args:
        probe: the function. Its arguments and its result are pickled.
        environment: variables in addition to this process's own.

    Raises:
        ProbeError: the process failed or hung.
    """
    name = f"{probe.__module__}.{probe.__name__}"
    try:
        result = subprocess.run(
            [sys.executable, "-c", RUN_PROBE, pickle.dumps((probe, arguments)).hex()],
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"{name}: no answer within {timeout_s:g} s") from None
    lines = result.stdout.splitlines()
    if result.returncode != 0 or not lines:
        stderr = result.stderr.strip()[-STDERR_CHARS:]
        raise ProbeError(f"{name}: exit status {result.returncode}\n{stderr}")
    # Imports in the process may print lines before the result.
    facts: Facts = pickle.loads(bytes.fromhex(lines[-1]))
    return facts


def last_line(text: str) -> str:
    """Return the last line of a traceback or a log that is not empty."""
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["no output"])[-1]
