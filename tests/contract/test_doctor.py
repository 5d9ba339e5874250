"""The real `verl-sglang-sync doctor`, on this installation and on a broken one, and what verl and
SGLang log on the broken one. Each is a process of its own; all three run at once.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from support.processes import break_imports, run_python

DOCTOR = (str(Path(sys.executable).with_name("verl-sglang-sync")), "doctor", "--json")
IMPORTS = (
    "import verl; print('verl goes on')\n"
    "from sglang.srt.plugins import load_plugins; load_plugins(); print('so does SGLang')"
)
BROKEN = ("verl_sglang_sync.preflight", "sglang_loader.hooks.weights")


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """The three."""
    folder = tmp_path_factory.mktemp("doctor")
    broken = break_imports(folder / "site", *BROKEN)
    with ThreadPoolExecutor(3) as pool:
        yield {
            "healthy": pool.submit(run_python, *DOCTOR, cwd=folder),
            "broken": pool.submit(run_python, *DOCTOR, cwd=folder, environment=broken),
            "imports": pool.submit(run_python, "-c", IMPORTS, cwd=folder, environment=broken),
        }


def report_of(process):
    """Exit status, checks by name, and the worst status of `doctor --json`."""
    result = process.result()
    assert result.stdout, result.stderr[-4000:]
    report = json.loads(result.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert len(checks) == len(report["checks"]), "names of checks are unique"
    return result.returncode, checks, report["status"]


def test_this_installation_is_healthy(processes):
    status, checks, overall = report_of(processes["healthy"])
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


def test_broken_plugins_fail_with_their_traceback(processes):
    status, checks, overall = report_of(processes["broken"])
    assert (status, overall) == (1, "fail")
    for name, module in zip(("verl plugin", "SGLang plugin"), BROKEN, strict=True):
        assert checks[name]["status"] == "fail"
        assert checks[name]["detail"] == f"ImportError: {module} is broken on purpose"
        assert "Traceback" in checks[name]["advice"]
    assert checks["recipe checks"]["status"] == "fail"
    assert checks["SGLang hooks"]["status"] == "fail"
    assert checks["Hydra config group"]["status"] == "ok"


def test_verl_and_sglang_go_on_but_the_errors_are_seen(processes):
    result = processes["imports"].result()
    assert "verl goes on" in result.stdout
    assert "so does SGLang" in result.stdout
    for text in (
        "ERROR",
        "verl-sglang-sync failed to load; +weight_sync=... would have no effect",
        "ImportError: verl_sglang_sync.preflight is broken on purpose",
        "verl-sglang-sync could not register its SGLang hooks; weight sync is off",
        "ImportError: sglang_loader.hooks.weights is broken on purpose",
    ):
        assert text in result.stderr
    assert result.stderr.count("Traceback") >= 2
