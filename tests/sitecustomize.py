"""Hands this process's command over to `support.preloaded`, if that shortens the process's imports.

Python imports this module before anything else, if its folder is on `PYTHONPATH`. The process that
was started then waits for its fork, passes signals on to the fork, and ends as the fork ends.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # prctl(2)
FORKED_MODULES = ("verl.trainer.main_ppo",)
FORKED_SCRIPTS = ("ray/_private/workers/default_worker.py", "bin/verl-sglang-sync")
NOT_FORKED_CODE = ("from multiprocessing.resource_tracker", "from multiprocessing.forkserver")
INSTALLATION = ("executable", "prefix", "exec_prefix", "orig_argv", "dont_write_bytecode")
MAX_FDS = 200  # of one message, at most 253
PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT, signal.SIGTERM)


def command_of(original: list[str], arguments: list[str]) -> tuple[str, str] | None:
    """Return the kind of this process's command, and what it runs, or None if it is not forked.

    Args:
        original: the command line.
        arguments: `sys.argv`.
    """
    number = len(original) - len(arguments)
    if arguments[0] == "-m" and original[number] in FORKED_MODULES:
        return "module", original[number]
    if arguments[0] == "-c" and not original[number].startswith(NOT_FORKED_CODE):
        return "code", original[number]
    if arguments[0].endswith(FORKED_SCRIPTS):
        return "script", arguments[0]
    return None


def inherited_fds() -> list[int]:
    """Return the numbers of the open files that this process was given."""
    numbers = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    return sorted(number for number in numbers if _is_inheritable(number))


def _is_inheritable(number: int) -> bool:
    try:
        return number <= 2 or os.get_inheritable(number)
    except OSError:  # the folder that was listed
        return False


def hand_over(address: str, kind: str, target: str) -> None:
    """Have the preloaded process fork, and end as the fork ends."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect(address)
    fds = inherited_fds()
    network = os.open("/proc/self/ns/net", os.O_RDONLY)
    request = {
        "kind": kind,
        "target": target,
        "arguments": sys.argv[1:],
        "path": sys.path,
        "installation": {name: getattr(sys, name) for name in INSTALLATION},
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "fds": fds,
        "unbuffered": sys.stdout.write_through,
    }
    data = json.dumps(request).encode()
    assert len(fds) < MAX_FDS
    socket.send_fds(link, [len(data).to_bytes(8, "little")], [network, *fds])
    link.sendall(data)
    os.close(network)
    if kind == "code":  # SGLang's processes end with the process that started them
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def pass_on(number: int, _: Any) -> None:
        link.send(bytes([number]))

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    answer = link.recv(4)
    status = int.from_bytes(answer, "little") if answer else int(signal.SIGKILL)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def main() -> None:
    address = os.environ.get("PRELOADED_PYTHON")
    command = command_of(sys.orig_argv, sys.argv)
    if not address or not command:
        return
    try:
        hand_over(address, *command)
    except BaseException:  # which Python would only print, and go on
        traceback.print_exc()
        os._exit(1)


main()
