"""Processes that run what they are told: functions go in, results or tracebacks come out.

    process = Remote(make_state, environment=..., log=folder / "rank0.log")
    process.begin(lambda state, x: state.grow(x), 3)
    outcome = process.outcome(limit_s=60)            # None: it is still busy

On this machine's CPU a process is a fork; on another host, or with a GPU, it is a command. A
test's own functions travel by value, so that it may say on the spot what a process does.
"""

import asyncio
import inspect
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

from support.forks import CPU_ENVIRONMENT, Fork, die_with_parent, python_path

CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
AFTER_CRASH_S = 120  # twice the limit of a sync, within which the other processes are to notice


@dataclass(frozen=True)
class Outcome:
    """What a call came to: its result, or its traceback."""

    result: Any = None
    error: str | None = None


def results_of(outcomes: Sequence[Outcome | None]) -> list[Any]:
    """None failed, and none is missing."""
    errors = [each.error if each else "no answer within the limit" for each in outcomes]
    assert not any(errors), "\n".join(error or "no error" for error in errors)
    return [outcome.result for outcome in outcomes if outcome is not None]


class Remote:
    """One process.

    Args:
        make: called there, makes the state that every later call gets as its first argument.
        environment: of the process.
        log: where its output goes.
        command: what the interpreter's command begins with, on another host; None: a fork.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        environment: Mapping[str, str],
        log: Path,
        command: Sequence[str] | None = None,
    ) -> None:
        self.log, self.is_busy, self.is_dead = log, False, False
        variables = {**environment, "PYTHONPATH": python_path(), "PYTHONFAULTHANDLER": "1"}
        self.link, theirs = Pipe()
        self.process: Fork | subprocess.Popen[bytes]
        if command is None:
            self.process = Fork(_serve, theirs, environment=variables, log=log)
        else:
            with log.open("wb") as output:
                self.process = subprocess.Popen(
                    [*command, sys.executable, "-m", "support.remote", str(theirs.fileno())],
                    env=variables,
                    pass_fds=[theirs.fileno()],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    preexec_fn=die_with_parent,
                )
        theirs.close()
        self.begin(make)

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """Have the process start a call, as soon as the one before has ended."""
        for name, module in list(sys.modules.items()):
            if name.rpartition(".")[2].startswith("test_"):
                cloudpickle.register_pickle_by_value(module)
        self.is_busy = True
        with suppress(OSError):
            self.link.send_bytes(cloudpickle.dumps((function, args)))

    def outcome(self, limit_s: float) -> Outcome | None:
        """Of the call that was begun; how the process died, if it did; None: it is still busy."""
        if not self.link.poll(limit_s):
            return None
        self.is_busy = False
        try:
            return Outcome(*cloudpickle.loads(self.link.recv_bytes()))
        except (EOFError, OSError):
            self.is_dead = True
            return Outcome(error=self._last_words())

    def kill(self) -> None:
        self.is_dead = True
        with suppress(ProcessLookupError):
            self.process.kill()

    def end(self) -> None:
        """Let the process end when it has nothing to do; else kill it."""
        self.link.close()
        if not self.is_busy and not self.is_dead:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        self.kill()
        self.process.wait()

    def _last_words(self) -> str:
        code = self.process.wait(10)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        log = self.log.read_text(errors="replace")
        crash = log.rfind("Fatal Python error")  # the names of all modules come last
        # A native library says why it aborts in the lines before.
        words = log[-4000:] if crash < 0 else log[max(0, crash - 2000) : crash + 8000]
        stacks = native_stacks(self.process.pid) if -code in CRASHES else ""
        return f"{how}:\n{words}\n{stacks}"


def native_stacks(pid: int) -> str:
    """The C stacks of a process that left a core dump here, which is removed; "" without gdb."""
    paths = (Path("core"), Path(f"core.{pid}"))
    found = [p for p in paths if p.is_file() and time.time() - p.stat().st_mtime < AFTER_CRASH_S]
    if not found:
        return ""
    stacks = ""
    with suppress(FileNotFoundError, subprocess.TimeoutExpired):
        stacks = subprocess.run(
            [
                *("gdb", "-batch", "-nx"),
                *("-ex", "set print frame-arguments none"),
                *("-ex", "thread apply all backtrace 16"),
                *(sys.executable, found[0]),
            ],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=AFTER_CRASH_S,
        ).stdout
    for path in found:
        path.unlink(missing_ok=True)
    return stacks[-10_000:]


def finish(processes: Sequence[Remote], limit_s: float) -> list[Outcome | None]:
    """Wait for all that are busy; None for one that is so at the limit, or was not before.

    Those that are busy `AFTER_CRASH_S` after another one has died are waited for no longer.
    """
    deadline = time.monotonic() + limit_s
    found: list[Outcome | None] = [None] * len(processes)
    while busy := {each.link: i for i, each in enumerate(processes) if each.is_busy}:
        ready = wait(list(busy), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for link in ready:
            i = busy[link]  # type: ignore[index]
            found[i] = processes[i].outcome(0)
            if processes[i].is_dead:
                deadline = min(deadline, time.monotonic() + AFTER_CRASH_S)
    return found


def run_interpreted(function: Callable[[], Any], log: Path) -> None:
    """Call it in a process in which Triton interprets its kernels; it must not fail."""
    process = Remote(function, environment={**os.environ, **CPU_ENVIRONMENT}, log=log)
    try:
        results_of(finish([process], AFTER_CRASH_S))
    finally:
        process.end()


def _serve(link: Connection) -> None:
    """The process: runs calls until the other end is closed; what they await goes on meanwhile."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))  # for `native_stacks`
    loop, state = asyncio.new_event_loop(), ()
    while True:
        try:
            data = loop.run_until_complete(loop.run_in_executor(None, link.recv_bytes))
        except EOFError:
            break
        try:
            function, args = cloudpickle.loads(data)
            result = function(*state, *args)
            if inspect.isawaitable(result):
                result = loop.run_until_complete(result)
            if not state:
                state, result = (result,), None
            answer = cloudpickle.dumps((result, None))
        except Exception:
            answer = cloudpickle.dumps((None, traceback.format_exc()))
        with suppress(OSError):
            link.send_bytes(answer)
    for made in state:
        if hasattr(made, "close"):
            made.close()


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
