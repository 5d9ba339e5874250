"""The result of a check, and probes: functions that run in a new process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

PROBE_TIMEOUT_S = 300.0
STDERR_CHARS = 4000
RUN_PROBE = """
import pickle, sys
probe, arguments = pickle.loads(bytes.fromhex(sys.stdin.read()))
sys.stdout.write("\\n" + pickle.dumps(probe(*arguments)).hex() + "\\n")
"""

Status = StrEnum("Status", ["OK", "WARN", "FAIL"])
"""Result of a check, the best first."""
OK, WARN, FAIL = Status


@dataclass(frozen=True)
class Check:
    """The result of one check. Scripts select checks by name, so names do not change."""

    name: str
    status: Status
    detail: str
    advice: str = ""


def guarded(name: str, check: Callable[..., Iterable[Check]], *arguments: Any) -> list[Check]:
    """Run a check, and return its results. An exception becomes a failed check."""
    try:
        return list(check(*arguments))
    except Exception as error:
        text = error_text(error)
        return [Check(name, FAIL, f"could not be checked: {text.splitlines()[-1]}", text)]


def error_text(error: Exception) -> str:
    """Return an error as text. The error of a probe is the end of what its process has printed."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {error.timeout:g} s"
    if isinstance(error, subprocess.CalledProcessError) and error.stderr.strip():
        return str(error.stderr).strip()[-STDERR_CHARS:]
    return f"{type(error).__name__}: {error}".strip()


def run_probe(probe: Callable[..., Any], environment: Mapping[str, str], *arguments: Any) -> Any:
    """Call a function of a module in a new process, with more environment variables."""
    result = subprocess.run(
        [sys.executable, "-c", RUN_PROBE],
        input=pickle.dumps((probe, arguments)).hex(),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PROBE_TIMEOUT_S,
        check=True,
    )
    # Imports in the process may print lines before the result.
    return pickle.loads(bytes.fromhex(result.stdout.splitlines()[-1]))
