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
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, subprocess.CalledProcessError) and error.stderr.strip():
            text = error.stderr[-STDERR_CHARS:]  # a probe's own error
        reason = text.strip().splitlines()[-1]
        return [Check(name, FAIL, f"could not be checked: {reason}", text)]


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
