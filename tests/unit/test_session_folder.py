"""The folder of a trainer's sockets: private, kept while its process lives, removed afterwards."""

import os
import shutil
import signal
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_loader.common.session import folder as session_folder
from sglang_loader.common.session.channel import engine_end, trainer_end
from sglang_loader.common.session.folder import (
    PREFIX,
    SessionFolder,
    checked_address,
    remove_orphans,
)
from sglang_loader.common.session.messages import SessionError
from sglang_loader.common.shared_memory import CpuHandle


@pytest.fixture
def parent(monkeypatch):
    """Where folders are made; shorter than pytest's own."""
    with tempfile.TemporaryDirectory() as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


def test_a_folder_is_private_and_ends_with_owner(parent):
    folder = SessionFolder()
    path = folder.path
    assert path.parent == parent
    assert path.name.startswith(PREFIX)
    assert path.stat().st_mode & 0o777 == 0o700
    assert folder.new_endpoint() != folder.new_endpoint()
    del folder
    assert not path.exists()


def test_too_long_socket_paths_prevent_a_folder(parent, monkeypatch):
    monkeypatch.setattr(session_folder, "MAX_PARENT_CHARS", len(str(parent)) - 1)
    assert SessionFolder().path.parent == Path("/tmp")


def test_ranks_that_start_together_leave_nothing_behind(parent):
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


def test_memory_handed_out_twice_is_listed_once(parent):
    folder = SessionFolder()
    for name in ("/one", "/other", "/one"):
        folder.record(CpuHandle(nbytes=7, name=name))
    assert (folder.path / "shared-memory").read_text() == "/one\n/other\n"


def test_living_owners_or_children_keep_the_folder(parent):
    """A data loader's worker has the lock's file open, too."""
    memory = Path(f"/dev/shm/weight-sync-test-{os.getpid()}")
    memory.write_bytes(b"weights")
    reading, writing = os.pipe()
    owner = os.fork()
    if owner == 0:
        try:
            folder = SessionFolder()
            folder.record(CpuHandle(nbytes=7, name=f"/{memory.name}"))
            if child := os.fork():
                os.write(writing, f"{child} {folder.path}".encode())
            time.sleep(60)
        finally:
            os._exit(1)
    pid, path = os.read(reading, 1000).decode().split()
    remove_orphans()
    assert Path(path).exists(), "its owner lives"
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    remove_orphans()
    assert Path(path).exists() and memory.exists(), "a child of it lives"
    os.kill(int(pid), signal.SIGKILL)
    deadline = time.monotonic() + 10
    while Path(path).exists():
        assert time.monotonic() < deadline
        assert SessionFolder().path.exists(), "which removes orphans"
    assert not memory.exists()


def whole(path):
    shutil.rmtree(path)


def files(path):
    """As cleaners that remove old files do: sockets and folders stay."""
    for name in ("owner", "shared-memory"):
        (path / name).unlink()


def replaced(path):
    """By a folder that others may enter."""
    shutil.rmtree(path)
    path.mkdir()
    path.chmod(0o755)


@pytest.mark.parametrize("clean", [whole, files, replaced])
def test_what_a_cleaner_removes_is_made_again(parent, caplog, clean):
    folder = SessionFolder()
    folder.record(CpuHandle(nbytes=7, name="/one"))
    for _ in range(2):  # more than once in its life
        assert folder.path.parent == parent
        clean(folder.path)
        endpoint = folder.new_endpoint()
        with trainer_end(endpoint), engine_end(endpoint):
            remove_orphans()
            assert folder.path.is_dir(), "it has a lock, that of a living process"
        assert (folder.path / "shared-memory").read_text() == "/one\n"
    assert caplog.text.count(": exclude ") == 2
    path = folder.path
    del folder
    assert not path.exists()


def test_a_missing_temporary_folder_is_replaced(parent, monkeypatch):
    temporary, other = parent / "temporary", parent / "other"
    for path in (temporary, other):
        path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(session_folder, "SHORT_PARENT", other)
    folder = SessionFolder()
    (temporary / folder.path.name).rename(other / "removed")
    temporary.rmdir()
    with trainer_end(folder.new_endpoint()):
        assert folder.path.parent == other


def test_a_removed_list_is_made_without_socket(parent, monkeypatch):
    """Engines on the network have no socket in the folder."""
    folder = SessionFolder()
    folder.record(CpuHandle(nbytes=7, name="/one"))
    shutil.rmtree(folder.path)
    now = time.monotonic() + session_folder.RESTORE_EVERY_S
    monkeypatch.setattr(time, "monotonic", lambda: now)
    folder.record(CpuHandle(nbytes=7, name="/one"))
    assert (folder.path / "shared-memory").read_text() == "/one\n"


def test_a_folder_that_vanishes_is_made_again(parent, monkeypatch):
    make, made = tempfile.mkdtemp, []

    def vanishes_once(**keywords):
        made.append(make(**keywords))
        if len(made) == 1:
            Path(made[0]).rmdir()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", vanishes_once)
    folder = SessionFolder()
    assert (len(made), list(parent.iterdir())) == (2, [folder.path])


@pytest.mark.parametrize("killed_in", ["mkdtemp", "flock", "rename"])
def test_a_trainer_killed_early_leaves_no_folder(parent, killed_in):
    calls = {
        "mkdtemp": (session_folder.SessionFolder, "_fill"),
        "flock": (session_folder.fcntl, "flock"),
        "rename": (Path, "with_name"),
    }
    owner = os.fork()
    if owner == 0:
        setattr(*calls[killed_in], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        try:
            SessionFolder()
        finally:
            os._exit(1)
    assert os.waitpid(owner, 0)[1] == signal.SIGKILL
    (left,) = parent.iterdir()
    assert left.name.startswith(f".{PREFIX}")
    living = SessionFolder()
    has_lock = killed_in == "rename"
    assert left.exists() is not has_lock, "without a lock a living trainer may be making it"
    if not has_lock:
        long_ago = time.time() - session_folder.STALE_S - 1
        os.utime(left, (long_ago, long_ago))
        later = SessionFolder()
        assert not left.exists()
        assert later.path.exists()
    assert living.path.exists()


def test_a_living_trainers_unfinished_folder_stays(parent):
    """However old, if it has a lock."""
    reading, writing = os.pipe()
    owner = os.fork()
    if owner == 0:
        try:
            Path.with_name = lambda *_: (os.write(writing, b"."), time.sleep(60))
            SessionFolder()
        finally:
            os._exit(1)
    assert os.read(reading, 1) == b"."
    (unfinished,) = parent.iterdir()
    os.utime(unfinished, (1, 1))
    remove_orphans()
    assert unfinished.exists()
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    remove_orphans()
    assert not unfinished.exists(), "the control"


def test_folders_of_others_are_left_alone(parent):
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


def test_an_engine_connects_to_a_trainers_socket(parent):
    folder = SessionFolder()
    endpoint = folder.new_endpoint()
    with pytest.raises(SessionError, match=r"expected ipc://.*No such file"):
        engine_end(endpoint)  # nothing is there yet
    with trainer_end(endpoint), engine_end(endpoint) as engine:
        assert engine.endpoint == endpoint


def bound(path, mode=0o700):
    """A socket's address; its folder is made."""
    path.parent.mkdir(exist_ok=True)
    path.parent.chmod(mode)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
    return f"ipc://{path}"


def in_a_link(parent):
    bound(parent / "real" / "1")
    (parent / f"{PREFIX}link").symlink_to(parent / "real")
    return f"ipc://{parent}/{PREFIX}link/1"


def linked(parent):
    bound(parent / f"{PREFIX}x" / "real")
    (parent / f"{PREFIX}x" / "1").symlink_to(parent / f"{PREFIX}x" / "real")
    return f"ipc://{parent}/{PREFIX}x/1"


FOREIGN = {
    "tcp": lambda parent: "tcp://127.0.0.1:5555",
    "abstract": lambda parent: f"ipc://@{parent}/{PREFIX}x/1",
    "no protocol": lambda parent: bound(parent / f"{PREFIX}x" / "1").removeprefix("ipc://"),
    "null byte": lambda parent: f"ipc://{parent}/{PREFIX}x/\0",
    "other folder": lambda parent: bound(parent / "mine" / "1"),
    "open to others": lambda parent: bound(parent / f"{PREFIX}x" / "1", mode=0o711),
    "a folder that is a link": in_a_link,
    "a socket that is a link": linked,
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN.keys())
def test_an_engine_connects_to_nothing_else(parent, make):
    with pytest.raises(SessionError, match="expected ipc://<folder>/weight-sync-"):
        engine_end(make(parent))


def test_a_socket_of_another_user_is_refused(parent, monkeypatch):
    endpoint = bound(parent / f"{PREFIX}x" / "1")
    with checked_address(endpoint):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with (
        pytest.raises(SessionError, match="another user owns the folder"),
        checked_address(endpoint),
    ):
        pass
