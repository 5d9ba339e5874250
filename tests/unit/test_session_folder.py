"""The folder of a trainer's sockets: private, kept while its process lives, removed afterwards."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_loader.common.session import folder as session_folder
from sglang_loader.common.session.channel import engine_end, trainer_end
from sglang_loader.common.session.folder import (
    PREFIX,
    SessionFolder,
    check_endpoint,
    remove_orphans,
)
from sglang_loader.common.session.messages import SessionError
from sglang_loader.common.shared_memory import CpuHandle


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where folders are made; shorter than pytest's own."""
    with tempfile.TemporaryDirectory() as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


def test_a_folder_is_private_and_goes_with_its_owner(parent: Path) -> None:
    folder = SessionFolder()
    path = folder.path
    assert path.parent == parent
    assert path.name.startswith(PREFIX)
    assert path.stat().st_mode & 0o777 == 0o700
    assert folder.new_endpoint() != folder.new_endpoint()
    del folder
    assert not path.exists()


def test_a_folder_is_not_made_where_a_sockets_path_would_be_too_long(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_folder, "MAX_PARENT_CHARS", len(str(parent)) - 1)
    assert SessionFolder().path.parent == Path("/tmp")


def forked(work: Callable[[], bytes]) -> tuple[int, bytes]:
    """A child that goes on living after its work; its process id, and what the work returned."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, work())
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(writing)
    answer = os.read(reading, 1000)
    os.close(reading)
    return child, answer


def ended(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A file of shared memory."""
    path = Path(f"/dev/shm/weight-sync-test-{os.getpid()}")
    path.write_bytes(b"weights")
    yield path
    path.unlink(missing_ok=True)


def test_what_a_killed_process_left_is_removed_by_the_next(parent: Path, memory: Path) -> None:
    def work() -> bytes:
        folder = SessionFolder()
        folder.record(CpuHandle(nbytes=7, name=f"/{memory.name}"))
        kept.append(folder)
        return str(folder.path).encode()

    kept: list[SessionFolder] = []
    owner, answer = forked(work)
    path = Path(answer.decode())
    remove_orphans()
    assert path.exists(), "its owner lives"
    assert memory.exists()
    ended(owner)
    assert path.exists()
    mine = SessionFolder()
    assert not path.exists()
    assert not memory.exists()
    assert mine.path.exists()


def test_ranks_that_start_together_leave_nothing_behind(parent: Path) -> None:
    """Each removes orphans as it starts; one that came too late must not make a file anew."""
    for number in range(300):
        orphan = parent / f"{PREFIX}{number}"
        orphan.mkdir(mode=0o700)
        for name in ("owner", "shared-memory", "1", "2"):
            (orphan / name).touch()
    with ThreadPoolExecutor(4) as ranks:
        for removal in [ranks.submit(remove_orphans) for _ in range(4)]:
            removal.result()
    assert list(parent.iterdir()) == []


def test_an_orphan_without_a_list_of_shared_memory_is_removed(parent: Path) -> None:
    (orphan := parent / f"{PREFIX}1").mkdir(mode=0o700)
    (orphan / "owner").touch()
    remove_orphans()
    assert not orphan.exists()


def test_a_folder_is_kept_while_a_child_of_its_owner_lives(parent: Path) -> None:
    """A data loader's worker has the lock's file open, too."""

    def work() -> bytes:
        kept.append(SessionFolder())
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        return f"{child} {kept[0].path}".encode()

    kept: list[SessionFolder] = []
    owner, answer = forked(work)
    child, path = answer.decode().split()
    ended(owner)
    remove_orphans()
    assert Path(path).exists()
    os.kill(int(child), signal.SIGKILL)
    deadline = time.monotonic() + 10
    while Path(path).exists():
        assert time.monotonic() < deadline
        remove_orphans()


def test_folders_of_others_are_left_alone(parent: Path) -> None:
    others = [parent / f"{PREFIX}without-a-lock", parent / f"{PREFIX}open", parent / "elsewhere"]
    for path in others:
        path.mkdir(mode=0o700)
    (others[1] / "owner").touch()
    (others[1] / "shared-memory").touch()
    others[1].chmod(0o755)
    remove_orphans()
    assert all(path.exists() for path in others)
    others[1].chmod(0o700)
    remove_orphans()
    assert [path.exists() for path in others] == [True, False, True], "the control"


def test_an_engine_connects_to_a_trainers_socket(parent: Path) -> None:
    folder = SessionFolder()
    endpoint = folder.new_endpoint()
    with pytest.raises(SessionError, match="expected ipc://"):
        check_endpoint(endpoint)  # nothing is there yet
    with trainer_end(endpoint):
        check_endpoint(endpoint)


def bound(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
    return f"ipc://{path}"


def in_a_link(parent: Path) -> str:
    folder = parent / "real"
    folder.mkdir(mode=0o700)
    (parent / f"{PREFIX}link").symlink_to(folder)
    bound(folder / "1")
    return f"ipc://{parent}/{PREFIX}link/1"


def linked(parent: Path) -> str:
    bound(parent / "real")
    folder = in_folder(parent)
    (folder / "1").symlink_to(parent / "real")
    return f"ipc://{folder}/1"


def in_folder(parent: Path, name: str = f"{PREFIX}x", mode: int = 0o700) -> Path:
    folder = parent / name
    folder.mkdir()
    folder.chmod(mode)
    return folder


def a_file(parent: Path) -> str:
    path = in_folder(parent) / "1"
    path.touch()
    return f"ipc://{path}"


FOREIGN = {
    "tcp": lambda parent: "tcp://127.0.0.1:5555",
    "abstract": lambda parent: f"ipc://@{parent}/{PREFIX}x/1",
    "no protocol": lambda parent: bound(in_folder(parent) / "1").removeprefix("ipc://"),
    "null byte": lambda parent: f"ipc://{parent}/{PREFIX}x/\0",
    "other folder": lambda parent: bound(in_folder(parent, "mine") / "1"),
    "open to others": lambda parent: bound(in_folder(parent, mode=0o711) / "1"),
    "a folder that is a link": in_a_link,
    "a socket that is a link": linked,
    "a file": a_file,
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN.keys())
def test_an_engine_connects_to_nothing_else(parent: Path, make: Callable[[Path], str]) -> None:
    with pytest.raises(SessionError, match="expected ipc://<folder>/weight-sync-"):
        engine_end(make(parent))


def test_a_socket_of_another_user_is_refused(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = bound(in_folder(parent) / "1")
    check_endpoint(endpoint)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(SessionError):
        check_endpoint(endpoint)
