"""What a process and its fork from `support.preloaded` have in common."""

import os
import signal
import subprocess
import sys

import pytest

from support.preloaded import preloaded_python

IMPORTS = "import os, sys, time; "
LIMIT_S = 60


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables of a process that is forked with numpy imported."""
    with preloaded_python(tmp_path_factory.mktemp("preloaded"), ["numpy"]) as variables:
        yield {**os.environ, **variables}


@pytest.fixture
def start(environment):
    """Start a process that runs code, and end it after the test."""
    processes = []

    def started(code, *arguments, **options):
        command = [sys.executable, "-c", IMPORTS + code, *arguments]
        options = {"env": environment, "stdout": subprocess.PIPE, "text": True, **options}
        processes.append(subprocess.Popen(command, **options))
        return processes[-1]

    yield started
    for process in processes:
        process.kill()
        process.communicate()


def test_the_fork_has_the_processes_surroundings(start, environment, tmp_path):
    """Numbers of open files from 3 on are those that the preloaded process uses itself."""
    reading, writing = os.pipe()
    numbers = range(3, 20)

    def open_all():
        for number in numbers:
            if number != writing:
                os.dup2(writing, number)
        os.set_inheritable(writing, True)

    code = (
        "print('numpy' in sys.modules, sys.argv, os.getcwd(), os.environ['COLOUR']); "
        f"[os.write(number, b'.') for number in range({numbers.start}, {numbers.stop})]"
    )
    variables = {**environment, "COLOUR": "green"}
    options = {"cwd": tmp_path, "env": variables, "preexec_fn": open_all, "close_fds": False}
    printed, _ = start(code, "argument", **options).communicate(timeout=LIMIT_S)
    assert printed == f"True ['-c', 'argument'] {tmp_path} green\n"
    assert os.read(reading, 64) == b"." * len(numbers)
    for end in (reading, writing):
        os.close(end)


def test_the_fork_has_the_processes_interpreter(environment, tmp_path):
    """What it starts, or looks for beside its interpreter, is of the same installation."""
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    code = "import multiprocessing.spawn as s, sys; print('numpy' in sys.modules, *{names})"
    names = "(sys.executable, s.get_executable().decode(), sys.orig_argv[0])"
    command = [str(python), "-c", code.format(names=names)]
    printed = subprocess.check_output(command, env=environment, text=True)
    assert printed == f"True {python} {python} {python}\n"


def test_another_command_is_not_forked(environment, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print('numpy' in sys.modules)")
    command = [sys.executable, str(script)]
    assert subprocess.check_output(command, env=environment, text=True) == "False\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("sys.exit(7)", 7),
        ("sys.exit('a message')", 1),
        ("1 / 0", 1),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("os.kill(os.getpid(), 15)", -signal.SIGTERM),
    ],
)
def test_the_process_ends_as_its_fork_does(start, code, status):
    assert start(code).wait(LIMIT_S) == status


def test_functions_registered_for_the_exit_run(start):
    process = start("import atexit; atexit.register(print, 'at the end')")
    assert process.communicate(timeout=LIMIT_S)[0] == "at the end\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_reaches_the_fork(start, number):
    """The pipe is closed once the fork has ended, too."""
    process = start("print('began', flush=True); time.sleep(600)")
    assert process.stdout.readline() == "began\n"
    process.send_signal(number)
    assert process.communicate(timeout=LIMIT_S)[0] == ""
    assert process.returncode == -number


def test_forks_draw_different_random_numbers(start):
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    drawn = [start(code).communicate(timeout=LIMIT_S)[0].split() for _ in range(2)]
    assert len({number for numbers in drawn for number in numbers}) == 4
