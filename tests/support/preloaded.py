"""Python processes that start with the libraries of verl and SGLang imported, but neither of them.

A training run starts some 15 Python processes: verl's driver, Ray's workers, SGLang's children. The
doctor starts four. Each imports the same libraries, torch, transformers and others, in four fifths
of the time that all imports take. With the variables of `preloaded_python`, each process is forked
from one that has imported these libraries. Every process imports verl, SGLang, Ray and our packages
itself, as a user's processes do, and reads its own variables in doing so.

    started process          `tests/sitecustomize.py`: sends its command, environment, folder
       |                     and open files, then waits
       v
    preloaded process        forks
       |
       v
    fork                     runs the command. A signal to the started process reaches the fork.
                             Each ends with the other.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import setproctitle

from support.forks import TESTS, die_with_parent, python_path

ADDRESS = "PRELOADED_PYTHON"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""What the libraries read when they are imported. `recipes/grpo_cpu_tiny.sh` exports the same."""
LIBRARIES = (
    "IPython.core",
    "accelerate",
    "aiohttp",
    "compressed_tensors",
    "datasets",
    "fastapi",
    "flashinfer",
    "gguf",
    "hydra",
    "openai",
    "pandas",
    "peft",
    "scipy.optimize",
    "tensordict",
    "torch",
    "torchvision",
    "transformers",
    "transformers.generation",
    "transformers.modeling_utils",
    "transformers.processing_utils",
    "uvicorn",
    "wandb",
    "xgrammar",
)
NOT_PRELOADED = ("ray", "sglang", "sglang_loader", "verl", "verl_sglang_sync", "megatron")
THREADS = {"python", "jemalloc_bg_thd"}  # jemalloc starts its thread again after a fork


@contextmanager
def preloaded_python(
    folder: Path, libraries: Sequence[str] = LIBRARIES
) -> Iterator[Mapping[str, str]]:
    """Start the preloaded process. Yield variables with which processes are forked from it.

    Args:
        folder: gets the log.
        libraries: are imported before the forks.
    """
    with tempfile.TemporaryDirectory() as short:  # a socket's address has at most 107 characters
        address = f"{short}/socket"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(address)
        listener.listen(128)  # whoever connects before the imports are done waits
        with listener, (folder / "preloaded.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "support.preloaded", str(listener.fileno()), *libraries],
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path()},
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        try:
            yield {ADDRESS: address, "PYTHONPATH": TESTS}
        finally:
            process.kill()
            process.wait()


def serve(listener: socket.socket) -> tuple[dict[str, Any], socket.socket]:
    """Fork for every command that comes in. Return the command, in the fork alone."""
    wakeup, woken = socket.socketpair()
    for end in (wakeup, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, _note)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # SGLang sends it to a scheduler's parent
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    waiting: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, wakeup], [], [])
        if wakeup in ready:
            wakeup.recv(4096)
            _answer(waiting)
        if listener not in ready:
            continue
        link, _ = listener.accept()
        if (received := _receive(link)) is None:
            link.close()
            continue
        request, fds = received
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            for opened in (listener, wakeup, woken, *waiting.values()):
                opened.close()
            return request, _become(request, fds, link)
        for fd in fds:
            os.close(fd)
        waiting[pid] = link


def _note(*_: object) -> None:
    """Have the signal wake the process up."""


def _answer(waiting: dict[int, socket.socket]) -> None:
    """Send the status of every fork that has ended to the process that waits for the fork."""
    while waiting:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with waiting.pop(pid) as link, suppress(OSError):
            link.send(status.to_bytes(4, "little"))


def _receive(link: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive a command and its open files, the network namespace first.

    None: the process that sent it was killed meanwhile.
    """
    try:
        head, fds, _, _ = socket.recv_fds(link, 8, 253)
        size, data = int.from_bytes(head, "little"), b""
        while len(data) < size and (received := link.recv(size - len(data))):
            data += received
    except ConnectionError:
        return None
    if len(head) < 8 or len(data) < size:
        for fd in fds:
            os.close(fd)
        return None
    return json.loads(data), fds


def _become(request: dict[str, Any], fds: list[int], link: socket.socket) -> socket.socket:
    """Take the place of the process that sent the command: files, network, folder, variables.

    Returns:
        `link`, at a number that the process did not use.
    """
    die_with_parent()
    os.setsid()
    network, *files = fds
    if os.fstat(network).st_ino != Path("/proc/self/ns/net").stat().st_ino:
        failed = ctypes.CDLL(None, use_errno=True).setns(network, 0)
        assert not failed, os.strerror(ctypes.get_errno())
    os.close(network)
    # First above all numbers that are wanted, so that no file takes the place of another one.
    above = max(*request["fds"], *files, link.fileno()) + 1
    moved = [_moved(fd, above) for fd in files]
    link = socket.socket(fileno=_moved(link.detach(), above))
    for fd, wanted in zip(moved, request["fds"], strict=True):
        os.dup2(fd, wanted, inheritable=True)
        os.close(fd)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = request["path"]
    for name, value in request["installation"].items():
        setattr(sys, name, value)
    multiprocessing.set_executable(sys.executable)
    importlib.invalidate_caches()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=request["unbuffered"])  # type: ignore[union-attr]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    return link


def _moved(fd: int, above: int) -> int:
    """Give an open file a number that is not below `above`."""
    number = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above)
    os.close(fd)
    return number


def _follow(link: socket.socket) -> NoReturn:
    """Send this process what the started process is sent, and end with the started process."""
    while True:
        numbers = link.recv(64)
        for number in numbers or [signal.SIGKILL]:
            os.kill(os.getpid(), number)


def run(request: dict[str, Any]) -> None:
    """Do what Python does with the command line."""
    kind, target, arguments = request["kind"], request["target"], request["arguments"]
    if kind == "module":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = [target, *arguments]
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif kind == "script":
        sys.path.insert(0, str(Path(target).parent))
        sys.argv = [target, *arguments]
        runpy.run_path(target, run_name="__main__")
    else:
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(target, main.__dict__)


def end_after(request: dict[str, Any]) -> NoReturn:
    """Run the command and end as Python does, but free no memory, which is shared until then."""
    status: Any = 1
    try:
        run(request)
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


def preload(libraries: Sequence[str]) -> None:
    """Import the libraries, and check that nothing else was imported or started."""
    gc.disable()  # an eighth of the time of the imports
    for name in libraries:
        with suppress(ImportError):  # not every SGLang brings all of them
            importlib.import_module(name)
    imported = [name for name in NOT_PRELOADED if name in sys.modules]
    assert not imported, imported
    threads = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    assert threads <= THREADS, threads
    # Where the process's title goes must be found before the environment changes.
    setproctitle.setproctitle("tests: preloaded")
    gc.collect()
    gc.freeze()  # a collection in a fork leaves alone what all forks share
    gc.enable()


if __name__ == "__main__":
    preload(sys.argv[2:])
    command, started_process = serve(socket.socket(fileno=int(sys.argv[1])))
    threading.Thread(target=_follow, args=(started_process,), daemon=True).start()
    end_after(command)
