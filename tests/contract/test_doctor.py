"""The real `verl-sglang-sync doctor`, on this installation and on a broken one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from support.processes import break_imports, run_python

SCRIPT = Path(sys.executable).with_name("verl-sglang-sync")


def run_doctor(cwd: Path, environment: dict[str, str]) -> tuple[int, dict[str, Any], str]:
    """Exit status, checks by name, and stderr of `doctor --json`."""
    result = run_python(str(SCRIPT), "doctor", "--json", cwd=cwd, environment=environment)
    assert result.stdout, result.stderr[-4000:]
    report = json.loads(result.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert len(checks) == len(report["checks"]), "names of checks are unique"
    return result.returncode, checks, report["status"]


def test_this_installation_is_healthy(tmp_path: Path) -> None:
    status, checks, overall = run_doctor(tmp_path, {})
    broken = {name: check for name, check in checks.items() if check["status"] == "fail"}
    assert not broken
    assert status == 0
    for name in (
        "entry point verl.plugins",
        "entry point sglang.srt.plugins",
        "entry point hydra.plugins",
        "verl plugin",
        "verl rollout class",
        "verl replica class",
        "recipe checks",
        "SGLang plugin",
        "SGLang hooks",
        "Hydra config group",
    ):
        assert checks[name]["status"] == "ok", checks[name]
    assert "update_weights_from_tensor" in checks["SGLang hooks"]["detail"]
    if not torch.cuda.is_available():
        assert checks["GPU"]["status"] == "warn"
        assert "VERL_PLATFORM=cpu" in checks["GPU"]["detail"]
        assert overall == "warn"


def test_broken_plugins_fail_with_their_traceback(tmp_path: Path) -> None:
    broken = ("verl_sglang_sync.preflight", "sglang_loader.hooks.weights")
    status, checks, overall = run_doctor(tmp_path, break_imports(tmp_path / "site", *broken))
    assert (status, overall) == (1, "fail")
    for name, module in zip(("verl plugin", "SGLang plugin"), broken, strict=True):
        assert checks[name]["status"] == "fail"
        assert checks[name]["detail"] == f"ImportError: {module} is broken on purpose"
        assert "Traceback" in checks[name]["advice"]
    assert checks["recipe checks"]["status"] == "fail"
    assert checks["SGLang hooks"]["status"] == "fail"
    assert checks["Hydra config group"]["status"] == "ok"
