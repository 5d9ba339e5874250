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
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


OK, WARN, FAIL = Status


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: short and stable, such as "verl plugin"; scripts select by it.
        status: a failure means that a recipe with `+weight_sync=...` cannot be relied on here.
        advice: what to do about it; empty if there is nothing to do.
    """

    name: str
    status: Status
    detail: str
    advice: str = ""


class ProbeError(RuntimeError):
    """A probe's process ended without a result; the message ends with its stderr."""


def run_probe(
    probe: Callable[..., Facts],
    environment: Mapping[str, str] | None = None,
    *arguments: object,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> Facts:
    """Call a module's function in a new process with this interpreter and the user's environment;
    arguments and result are pickled.

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
    facts: Facts = pickle.loads(bytes.fromhex(lines[-1]))
    return facts


def last_line(text: str) -> str:
    """The last non-empty line of a traceback or a log."""
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["no output"])[-1]
