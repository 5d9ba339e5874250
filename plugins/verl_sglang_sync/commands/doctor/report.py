"""Runs all checks, and shows their results as text for people or as JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from textwrap import indent

import torch

from sglang_loader.probe import collect
from verl_sglang_sync.commands.doctor.check import OK, Check, Status, guarded
from verl_sglang_sync.commands.doctor.hardware import cuda_ipc_checks, nccl_checks
from verl_sglang_sync.commands.doctor.installation import plugin_checks, probe_verl, version_checks
from verl_sglang_sync.commands.doctor.presets import recipe_checks


def diagnose(recipe: Sequence[str]) -> list[Check]:
    """Run all checks, which takes about 20 seconds. If the recipe is empty, check a usual one."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # Without a GPU the import of sglang fails unless this variable is set.
    environment = {} if num_gpus else {"SGLANG_USE_CPU_ENGINE": "1"}
    # The imports of verl and of SGLang take most of the time, each in a process of its own.
    with ThreadPoolExecutor() as pool:
        results = (
            pool.submit(guarded, "versions", version_checks),
            pool.submit(guarded, "verl plugin", plugin_checks, "verl", probe_verl, environment),
            pool.submit(guarded, "SGLang plugin", plugin_checks, "SGLang", collect, environment),
            pool.submit(guarded, "CUDA IPC", cuda_ipc_checks, num_gpus),
            pool.submit(guarded, "NCCL", nccl_checks, num_gpus),
            pool.submit(guarded, "recipe", recipe_checks, recipe, num_gpus),
        )
    return [check for result in results for check in result.result()]


def as_json(checks: Sequence[Check]) -> str:
    """Return `{"status": worst, "checks": [{"name", "status", "detail", "advice"}, ...]}`."""
    worst = max((check.status for check in checks), key=list(Status).index, default=OK)
    return json.dumps({"status": worst, "checks": [asdict(check) for check in checks]}, indent=2)


def as_text(checks: Sequence[Check]) -> str:
    """Return a line for each check, with its advice below."""
    lines = []
    for check in checks:
        lines.append(f"{check.status.upper():4}  {check.name}: {check.detail}")
        if check.advice:
            lines.append(indent(check.advice, " " * 6))
    return "\n".join(lines)
