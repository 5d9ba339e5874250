"""Runs a probe: a module that looks at one thing in a process of its own and prints JSON facts.

    facts = run_probe("sglang_loader.probe", SGLangFacts)

A probe gets the user's environment and interpreter, so it sees what a training run would see.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import TypeVar

import msgspec

PROBE_TIMEOUT_S = 300.0
STDERR_CHARS = 4000

Facts = TypeVar("Facts", bound=msgspec.Struct)


class ProbeError(RuntimeError):
    """A probe's process ended without facts; the message ends with what it said last."""


def run_probe(
    module: str,
    facts: type[Facts],
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> Facts:
    """Run `python -m module` and parse the last line of its output.

    Args:
        module: dotted path of the probe.
        facts: what it prints.
        environment: variables to set on top of this process's.
        timeout_s: limit of the process, in seconds.

    Raises:
        ProbeError: the process failed, hung, or printed something else.
    """
    try:
        result = subprocess.run(
            [sys.executable, "-m", module],
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"{module}: no answer within {timeout_s:g} s") from None
    lines = result.stdout.splitlines()
    if result.returncode != 0 or not lines:
        said = result.stderr.strip()[-STDERR_CHARS:]
        raise ProbeError(f"{module}: exit status {result.returncode}\n{said}")
    try:
        return msgspec.json.decode(lines[-1], type=facts)
    except msgspec.MsgspecError as error:
        raise ProbeError(f"{module}: {error}; got {lines[-1][:200]!r}") from None


def write_facts(facts: msgspec.Struct) -> None:
    """Print a probe's facts, on a line of their own."""
    sys.stdout.write("\n" + msgspec.json.encode(facts).decode() + "\n")
