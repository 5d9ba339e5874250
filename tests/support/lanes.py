"""Two lanes of tests, with `--two-lanes`: a fork of pytest runs some files, pytest all others.

    pytest    imports torch, verl and SGLang as it collects the tests, then forks
      |  \\
      |   fork    takes a file that no lane has taken, runs its tests, takes the next one, and sends
      v           its reports through a pipe
    pytest    does the same, and reports the tests of both lanes: there is one summary, one status

The tests that wait for training runs stay with pytest, so that no run is made twice. The lanes
share pytest's temporary folder, where each folder gets a number of its own, and the fork server of
`support.forks`. All that listens in a test takes a port that is free.
"""

import itertools
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import pytest
import torch

from support.forks import die_with_parent, share_fork_server, start_fork_server

MIN_TESTS = 200
"""Fewer tests run in one lane."""

STARTS_TRAININGS, WAITS_FOR_TRAININGS = "training_ahead", "trainings"
"""Fixtures of the tests that pytest runs first and last."""

Tests = Sequence[pytest.Item]
Message = tuple[str, Any]
BEGAN, REPORT, ENDED = "began", "report", "ended"
_NUMBER_BYTES = 2


class Untaken:
    """The files that no lane has taken. Their numbers are in a pipe, from which both lanes read."""

    def __init__(self, files: Sequence[Tests]) -> None:
        self._files = files
        numbers = [number.to_bytes(_NUMBER_BYTES, "little") for number in range(len(files))]
        self._pipe, writing = os.pipe()
        os.write(writing, b"".join(numbers))
        os.close(writing)

    def __iter__(self) -> Iterator[Tests]:
        while number := os.read(self._pipe, _NUMBER_BYTES):
            yield self._files[int.from_bytes(number, "little")]


class Reports:
    """The plugin of the fork that sends reports to pytest."""

    def __init__(self, config: pytest.Config, link: Connection) -> None:
        self._config, self._link = config, link

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._link.send((BEGAN, nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._link.send((REPORT, data))


class Fork:
    """A fork of pytest that runs tests. A thread receives its reports."""

    def __init__(self, session: pytest.Session, files: Iterable[Tests]) -> None:
        self._session, self._received = session, queue.SimpleQueue[Message | None]()
        self._running, self._has_ended = "its first test", False
        # Both lanes make their folders there.
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        reading, writing = Pipe(duplex=False)
        self._pid = os.fork()
        if self._pid == 0:
            die_with_parent()
            reading.close()
            _run_and_exit(session, files, writing)
        writing.close()
        threading.Thread(target=self._receive, args=(reading,), daemon=True).start()

    def report(self, *, waits: bool) -> None:
        """Report what was received so far, or, if it `waits`, all that the fork will send."""
        config = self._session.config
        while not self._has_ended and (waits or not self._received.empty()):
            message = self._received.get()
            if message is None:
                raise RuntimeError(f"the second lane {self._end_of_fork()}")
            kind, data = message
            if kind == BEGAN:
                self._running = data
            elif kind == ENDED:
                self._has_ended = True
            else:
                report = config.hook.pytest_report_from_serializable(config=config, data=data)
                config.hook.pytest_runtest_logreport(report=report)
                _stop_if_told(self._session)

    def end(self) -> None:
        """Kill the fork, if it has not ended."""
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, 9)
            os.waitpid(self._pid, 0)

    def _receive(self, link: Connection) -> None:
        with suppress(EOFError):
            while True:
                self._received.put(link.recv())
        self._received.put(None)

    def _end_of_fork(self) -> str:
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return f"ended with status {status} in {self._running}"


def _run_and_exit(session: pytest.Session, files: Iterable[Tests], link: Connection) -> NoReturn:
    """Run the tests in the fork."""
    plugins, status = session.config.pluginmanager, 1
    share_fork_server()
    try:
        plugins.unregister(name="terminalreporter")
        capture: Any = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # whose files are those of the other process
        capture.start_global_capturing()
        capture.suspend_global_capture()
        plugins.register(Reports(session.config, link))
        run(session, files)
        link.send((ENDED, None))
        status = 0
    finally:
        os._exit(status)


def run(session: pytest.Session, files: Iterable[Tests], beside: Fork | None = None) -> None:
    """Run tests as pytest's own loop does, and report the tests of a fork `beside` them."""
    items = itertools.chain(itertools.chain.from_iterable(files), [None])
    for item, next_item in itertools.pairwise(items):
        assert item is not None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
        _stop_if_told(session)
        if beside is not None:
            beside.report(waits=False)


def _stop_if_told(session: pytest.Session) -> None:
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def run_in_two_lanes(session: pytest.Session) -> bool | None:
    """Run all tests, or return None if one lane is enough."""
    if len(session.items) < MIN_TESTS or session.testsfailed or session.config.option.collectonly:
        return None
    first, last, others = [], [], []
    for _, items in itertools.groupby(session.items, key=lambda item: item.path):
        tests = list(items)
        fixtures = {name for item in tests for name in getattr(item, "fixturenames", ())}
        if STARTS_TRAININGS in fixtures:
            first.append(tests)
        elif WAITS_FOR_TRAININGS in fixtures:
            last.append(tests)
        else:
            others.append(tests)
    start_fork_server()
    torch.set_num_threads(1)  # the lanes share the cores, and threads do not come into a fork
    untaken = Untaken(others)
    fork = Fork(session, untaken)
    try:
        run(session, itertools.chain(first, untaken, last), fork)
        fork.report(waits=True)
    finally:
        fork.end()
    return True
