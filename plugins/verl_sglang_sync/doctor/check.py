"""The result of a check, and probes: functions that look at something in a process of their own."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar, get_type_hints

import msgspec

PROBE_TIMEOUT_S = 300.0
STDERR_CHARS = 4000
RUN_PROBE = """
import importlib, pickle, sys, msgspec
probe = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
facts = probe(*pickle.loads(bytes.fromhex(sys.argv[3])))
sys.stdout.write("\\n" + msgspec.json.encode(facts).decode() + "\\n")
"""

Facts = TypeVar("Facts")


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


OK, WARN, FAIL = Status


@dataclass(frozen=True)
class Check:
    """What was looked at and what came of it.

    Attributes:
        name: short and stable, such as "verl plugin"; scripts select by it.
        status: a failure means that a recipe with `+weight_sync=...` cannot be relied on here.
        advice: what to do about it; empty where nothing is to be done.
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
    """Call a module's function in a new process that has this interpreter and the user's
    environment; msgspec must be able to decode its annotated result from JSON.

    Raises:
        ProbeError: the process failed, hung, or returned something else.
    """
    name = f"{probe.__module__}.{probe.__name__}"
    command = [sys.executable, "-c", RUN_PROBE, probe.__module__, probe.__name__]
    try:
        result = subprocess.run(
            [*command, pickle.dumps(arguments).hex()],
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
    try:
        facts: Facts = msgspec.json.decode(lines[-1], type=get_type_hints(probe)["return"])
        return facts
    except msgspec.MsgspecError as error:
        raise ProbeError(f"{name}: {error}; got {lines[-1][:200]!r}") from None


def last_line(text: str) -> str:
    """The last non-empty line of a traceback or a log."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
