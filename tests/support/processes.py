"""Python processes for contract tests: started like a user's, optionally with broken imports."""

import json
import os
import subprocess
from pathlib import Path

TIMEOUT_S = 300
CPU_ENGINE = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
DOCTOR = ("doctor", "--json")

_BREAKER = '''
import sys

class Breaker:
    """Makes the named modules fail to import, as a missing or broken dependency would."""

    def find_spec(self, name, path=None, target=None):
        if name in {modules!r}:
            raise ImportError(f"{{name}} is broken on purpose")
        return None

sys.meta_path.insert(0, Breaker())
'''


def run_process(
    *command: str, cwd: Path, environment: dict[str, str] | None = None
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
    """Environment in which importing any of `modules` raises ImportError, in every process."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_BREAKER.format(modules=modules))
    return {"PYTHONPATH": str(folder)}
