"""Runs all checks, and shows their results as text for people or as JSON for scripts."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from textwrap import indent

import torch

from sglang_loader.probe import collect as probe_sglang
from verl_sglang_sync.commands.doctor import hardware, installation, presets
from verl_sglang_sync.commands.doctor.check import FAIL, OK, Check, Status, last_line


def diagnose(overrides: Sequence[str] = ()) -> list[Check]:
    """Run all checks, which takes about 20 seconds. Return their results in a fixed order.

    Args:
        overrides: the user's recipe, or empty for a usual one.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # Without a GPU the import of sglang fails unless this variable is set.
    environment = {} if num_gpus else {"SGLANG_USE_CPU_ENGINE": "1"}
    with ThreadPoolExecutor(max_workers=3) as pool:
        verl, sglang = (
            pool.submit(
                guarded,
                f"{engine} plugin",
                partial(installation.plugin_checks, engine, probe, environment),
            )
            for engine, probe in (("verl", installation.probe_verl), ("SGLang", probe_sglang))
        )
        ipc = pool.submit(guarded, "CUDA IPC", partial(hardware.cuda_ipc_checks, num_gpus))

        checks: tuple[tuple[str, Callable[[], Iterable[Check]]], ...] = (
            ("versions", installation.version_checks),
            ("verl plugin", verl.result),
            ("SGLang plugin", sglang.result),
            ("CUDA IPC", ipc.result),
            ("NCCL", partial(hardware.nccl_checks, num_gpus)),
            ("recipe", partial(presets.recipe_checks, overrides, num_gpus)),
        )
        return [result for name, check in checks for result in guarded(name, check)]


def guarded(name: str, check: Callable[[], Iterable[Check]]) -> list[Check]:
    """Run a check, and return its results. An exception becomes a failed check."""
    try:
        return list(check())
    except Exception as error:
        reason = last_line(traceback.format_exc())
        return [Check(name, FAIL, f"could not be checked: {reason}", str(error))]


def as_json(checks: Sequence[Check]) -> str:
    """Return `{"status": worst, "checks": [{"name", "status", "detail", "advice"}, ...]}`."""
    worst = max((check.status for check in checks), key=list(Status).index, default=OK)
    return json.dumps({"status": worst, "checks": [asdict(check) for check in checks]}, indent=2)


def as_text(checks: Sequence[Check]) -> str:
    """Return a line per check, with its advice below, and the number of checks by status."""
    lines = []
    for check in checks:
        lines.append(f"{check.status.upper():4}  {check.name}: {check.detail}")
        if check.advice:
            lines.append(indent(check.advice, " " * 6))
    counts = {status: [check.status for check in checks].count(status) for status in Status}
    lines.append(", ".join(f"{num} {status}" for status, num in counts.items() if num))
    return "\n".join(lines)
