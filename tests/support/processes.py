"""Python processes for contract tests: started like a user's, optionally with broken imports."""

import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 300
CPU_ENGINE = {"SGLANG_USE_CPU_ENGINE": "1"}

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


def run_python(
    *arguments: str,
    python: Path | str = sys.executable,
    cwd: Path,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter with the CPU engine's environment, and wait for it."""
    variables = {"PYTHONDONTWRITEBYTECODE": "1", **CPU_ENGINE, **(environment or {})}
    return run_process(str(python), *arguments, cwd=cwd, environment=variables)


def run_process(
    *command: str, cwd: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command, with `environment` beside this process's, and wait for it."""
    return subprocess.run(
        command,
        env={**os.environ, **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def break_imports(folder: Path, *modules: str) -> dict[str, str]:
    """Environment in which importing any of `modules` raises ImportError, in every process."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_BREAKER.format(modules=modules))
    return {"PYTHONPATH": str(folder)}
