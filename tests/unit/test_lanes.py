"""Two lanes of tests have one summary and one exit status, whatever happens in the second lane."""

import os

import pytest

from support.forks import Fork

CONFTEST = """
import os, time
from pathlib import Path
import pytest
from support import lanes

lanes.MIN_TESTS, lanes.start_fork_server = 0, bool
FOLDER, PYTEST = Path(__file__).parent, os.getpid()

@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    return lanes.run_in_two_lanes(session)

@pytest.fixture
def is_fork(request):
    '''True in the second lane. Both lanes have begun a test of theirs.'''
    (FOLDER / f"{os.getpid()}.pid").touch()
    while len(list(FOLDER.glob("*.pid"))) < 2:
        time.sleep(0.01)
    return os.getpid() != PYTEST
"""
TEST = """
import os, sys

def test_of_a_lane(is_fork):
    print("which lane:", is_fork)
    {body}

def test_after():
    pass
"""
LIMIT_S = 200  # the first fork of all waits for the imports


def run_in_lanes(folder, body, *options):
    """Run two files of tests with `body` in two lanes; return the exit status, and the output."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name in ("test_one.py", "test_two.py"):
        (folder / name).write_text(TEST.format(body=body))
    arguments = ["-q", "-p", "no:cacheprovider", *options, str(folder)]
    code = f"import sys, pytest; sys.exit(pytest.main({arguments}))"
    process = Fork(exec, code, environment=os.environ, log=folder / "log")
    try:
        return process.wait(LIMIT_S), (folder / "log").read_text()
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("body", "status", "printed"),
    [
        ("pass", 0, ["4 passed"]),
        ("assert not is_fork, 'of the fork'", 1, ["1 failed, 3 passed", "which lane: True"]),
        ("assert is_fork, 'of pytest'", 1, ["1 failed, 3 passed", "which lane: False"]),
        ("is_fork and os._exit(7)", 3, ["the second lane ended with status 7 in ", "_of_a_lane"]),
    ],
)
def test_the_summary_is_that_of_both_lanes(tmp_path, body, status, printed):
    ended_with, output = run_in_lanes(tmp_path, body)
    assert ended_with == status, output
    for text in printed:
        assert text in output


def test_the_second_lane_ends_with_the_first_failure(tmp_path):
    body = "import time; is_fork and time.sleep(600); assert is_fork"
    status, output = run_in_lanes(tmp_path, body, "-x")
    assert status == 1, output
    assert "1 failed" in output and "passed" not in output
