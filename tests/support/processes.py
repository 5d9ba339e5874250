"""Python processes for contract tests: started like a user's, optionally with broken plugins."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from support.our_imports import PLUGINS

TIMEOUT_S = 300
CPU_ENGINE = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
DOCTOR = ("doctor", "--json")


def run_process(
    *command: str, cwd: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command, with `environment` and the CPU engine's beside this process's, and wait."""
    return subprocess.run(
        command,
        env={**os.environ, **CPU_ENGINE, **(environment or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def report_of(
    doctor: subprocess.CompletedProcess[str],
) -> tuple[int, dict[str, dict[str, str]], str]:
    """Exit status, checks by name, and the worst status, of a command with the options `DOCTOR`."""
    assert doctor.stdout, doctor.stderr[-4000:]
    report = json.loads(doctor.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert len(checks) == len(report["checks"]), "names of checks are unique"
    return doctor.returncode, checks, report["status"]


def break_imports(folder: Path, *modules: str) -> dict[str, str]:
    """Copy the plugins to a new folder, where `modules` raise ImportError, as a broken dependency
    would make them do. Return the environment in which every process imports the copy.
    """
    shutil.copytree(PLUGINS, folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for module in modules:
        file = folder / f"{module.replace('.', os.sep)}.py"
        assert file.exists()
        file.write_text(f'raise ImportError("{module} is broken on purpose")\n')
    return {"PYTHONPATH": str(folder)}


def joined(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of both. A module is looked for in the folders of `first` first."""
    path = os.pathsep.join(each["PYTHONPATH"] for each in (first, second))
    return {**first, **second, "PYTHONPATH": path}
