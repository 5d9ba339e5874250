"""The real `verl-sglang-sync doctor` on a broken installation, and what verl and SGLang log on it.

Each is a process of its own; both run at once. A healthy one: `test_packaging`.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.processes import DOCTOR, break_imports, joined, report_of, run_process

COMMAND = (str(Path(sys.executable).with_name("verl-sglang-sync")), *DOCTOR)
IMPORTS = (
    "import verl; print('verl goes on')\n"
    "from sglang.srt.plugins import load_plugins; load_plugins(); print('so does SGLang')"
)
BROKEN = ("verl_sglang_sync.preflight", "sglang_loader.hooks.weights")


@pytest.fixture(scope="module")
def processes(tmp_path_factory, preloaded):
    """Both."""
    folder = tmp_path_factory.mktemp("doctor")
    broken = joined(break_imports(folder / "site", *BROKEN), preloaded)
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(run_process, sys.executable, *command, cwd=folder, environment=broken)
            for name, command in (("doctor", COMMAND), ("imports", ("-c", IMPORTS)))
        }


def test_broken_plugins_fail_with_their_traceback(processes):
    status, checks, overall = report_of(processes["doctor"].result())
    assert (status, overall) == (1, "fail")
    for name, module in zip(("verl plugin", "SGLang plugin"), BROKEN, strict=True):
        assert checks[name]["status"] == "fail"
        assert checks[name]["detail"] == f"ImportError: {module} is broken on purpose"
        assert "Traceback" in checks[name]["advice"]
    assert checks["verl hooks"]["status"] == "fail"
    assert checks["SGLang hooks"]["status"] == "fail"
    assert "preflight is broken" in checks["recipe"]["detail"]


def test_verl_and_sglang_continue_with_visible_errors(processes):
    result = processes["imports"].result()
    assert "verl goes on" in result.stdout
    assert "so does SGLang" in result.stdout
    for text in (
        "ERROR",
        "verl-sglang-sync failed to load, so +weight_sync=... would have no effect",
        "ImportError: verl_sglang_sync.preflight is broken on purpose",
        "verl-sglang-sync could not register its SGLang hooks. Weight sync is off",
        "ImportError: sglang_loader.hooks.weights is broken on purpose",
    ):
        assert text in result.stderr
    assert result.stderr.count("Traceback") >= 2
