"""Processes that start with torch, verl and SGLang imported: forks of one that has done so.

Importing SGLang takes 12 s of CPU time, and a server has at least three processes. The first fork
of a test session pays for the import, the others start at once. Processes that verl starts in tests
import verl and SGLang themselves, as a user's do. Those of training runs (`test_training_*`) and of
commands are forks with the libraries of verl and SGLang imported (`support.preloaded`).
"""

import ctypes
import faulthandler
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

PR_SET_PDEATHSIG = 1  # prctl(2)
TESTS = str(Path(__file__).resolve().parents[1])
RECIPES = str(Path(TESTS).parent / "recipes")
CPU_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "cpu_platform",  # in recipes/
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_NCCL_SO_PATH": "/nonexistent",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "TRITON_INTERPRET": "1",  # there is no GPU to compile kernels for: see `support.interpreted`
}
"""What the libraries read when they are imported."""

IMPORTED = "support.imported"
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([IMPORTED])
_starting = threading.Lock()


class Fork:
    """A running fork, with the methods of `subprocess.Popen`.

    All end with the thread that starts the first, as `die_with_parent` has it: the main thread.

    Args:
        call: what it does; a module's function, with arguments that can be pickled.
        environment: its variables, as far as they are read after the imports.
        log: where its output goes.
    """

    def __init__(
        self, call: Callable[..., Any], *args: Any, environment: Mapping[str, str], log: Path
    ) -> None:
        start_fork_server()
        self._process = _FORKS.Process(target=_run, args=(call, args, dict(environment), str(log)))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code when it has ended; `subprocess.TimeoutExpired` after `timeout` seconds."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def kill(self) -> None:
        self._process.kill()


def start_fork_server() -> None:
    """Start the process from which all forks come, if it does not run yet. It imports meanwhile."""
    variables = {**CPU_ENVIRONMENT, "PYTHONPATH": python_path()}
    with _starting, mock.patch.dict(os.environ, variables):
        forkserver._forkserver.ensure_running()  # type: ignore[attr-defined]


def share_fork_server() -> None:
    """In a fork of this process: have the fork server that was started before serve it, too."""
    # The original asks the kernel about a child, which the fork server is of the parent alone.
    forkserver._forkserver.ensure_running = _nothing  # type: ignore[attr-defined]


def _nothing() -> None: ...


def python_path() -> str:
    """The `PYTHONPATH` with which other processes find the modules of tests and recipes."""
    return os.pathsep.join(filter(None, (TESTS, RECIPES, os.environ.get("PYTHONPATH"))))


def die_with_parent() -> None:
    """Runs in the child: the kernel ends it if its parent is killed before it can clean up."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(*arguments: str) -> None:
    """`python -m sglang.launch_server` in a fork; its schedulers are forks, too."""
    if package := os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"):
        importlib.import_module(package)  # SGLang did not see the variable as it was imported
    choose = multiprocessing.set_start_method
    with mock.patch.object(
        multiprocessing, "set_start_method", lambda _, force: choose("fork", force=force)
    ):
        sys.argv = ["sglang.launch_server", *arguments]
        runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def _run(
    call: Callable[..., Any], args: tuple[Any, ...], environment: Mapping[str, str], log: str
) -> None:
    die_with_parent()
    os.setsid()
    assert IMPORTED in sys.modules, "multiprocessing says nothing where it cannot import it"
    with Path(log).open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.enable(file=2)  # a crash in native code leaves Python's traceback in the log
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # found anew, from this environment
    call(*args)
