"""The private folder in which a trainer's process keeps the sockets of its sessions.

A folder `weight-sync-*` (mode 0700) holds the sockets, a list of the shared memory that the process
has shared, and a file that the process keeps locked as long as it lives. A process that was killed
cannot clean up. The next process that makes a folder removes the folders without a lock, and the
shared memory that they list. A cleaner of temporary files may remove files of a living process's
folder. They are made again.

    folder = SessionFolder()               # trainer
    endpoint = folder.new_endpoint()
    folder.record(handle)                  # before it is sent

    with checked_address(endpoint) as address: ...    # engine: connect to nothing else
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

from sglang_loader.common.host_memory import HostHandle
from sglang_loader.common.session.messages import SessionError
from sglang_loader.common.shared_memory import SHARED_MEMORY, BufferHandle, CpuHandle

logger = logging.getLogger(__name__)

PREFIX = "weight-sync-"
UNFINISHED = f".{PREFIX}"
"""The prefix of a folder that has no lock yet."""
MAX_PARENT_CHARS = 70  # a UNIX socket's path has 107
SHORT_PARENT = Path("/tmp")
ATTEMPTS = 5
RESTORE_EVERY_S = 1.0
STALE_S = 3600.0
"""The age at which an unfinished folder without a lock is removed. Making a folder takes
milliseconds."""
_LOCK = "owner"
_SHARED_MEMORY = "shared-memory"


class SessionFolder:
    """The folder of this process. It is removed with this object, or when its process ends."""

    def __init__(self) -> None:
        remove_orphans()
        self._num_sockets = 0
        self._listed: dict[str, None] = {}  # in their order
        self._make()

    def new_endpoint(self) -> str:
        """Return an unused zmq address in the folder."""
        self._restore()
        self._num_sockets += 1
        return f"ipc://{self.path}/{self._num_sockets}"

    def record(self, handle: BufferHandle) -> None:
        """List the shared memory of a handle. Others remove it if this process is killed."""
        if isinstance(handle, HostHandle):
            return  # nothing is left of the file
        name = handle.name if isinstance(handle, CpuHandle) else handle.counter_file
        if time.monotonic() >= self._restore_at:  # there may be thousands of handles in each sync
            self._restore()
        if name not in self._listed:
            self._listed[name] = None
            self._list.write(f"{name}\n")
            self._list.flush()

    def _make(self) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            # The folder has another name until it is locked. Otherwise another process might take
            # it for an orphan.
            made = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=_parent()))
            try:
                self._fill(made)
                self.path = made.rename(made.with_name(made.name.removeprefix(".")))
                break
            except FileNotFoundError:  # a cleaner, or this process stood still for STALE_S
                if attempt == ATTEMPTS:
                    raise
        self._finalizer = weakref.finalize(self, _remove_own, self.path, os.getpid())

    def _fill(self, path: Path) -> None:
        """Make the lock and the list."""
        # Neither file has its name before it is complete: a lock that another process finds
        # unlocked is a dead process's.
        lock, listed = (path / f".{name}" for name in (_LOCK, _SHARED_MEMORY))
        self._lock = lock.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._list = listed.open("w")
        self._list.writelines(f"{name}\n" for name in self._listed)
        self._list.flush()
        listed.rename(path / _SHARED_MEMORY)
        lock.rename(path / _LOCK)
        self._restore_at = time.monotonic() + RESTORE_EVERY_S

    def _restore(self) -> None:
        """Make the folder and its files again if a cleaner of temporary files has removed them."""
        self._restore_at = time.monotonic() + RESTORE_EVERY_S
        if _is_at(self.path / _LOCK, self._lock) and _is_at(self.path / _SHARED_MEMORY, self._list):
            return
        logger.warning(
            "a cleaner of temporary files has removed %s or files in it. They are made again. A "
            "sync that runs in such a moment can fail: exclude %s* from the cleaning",
            self.path,
            self.path.parent / PREFIX,
        )
        try:
            os.close(open_private(self.path))
            self._fill(self.path)
        except OSError:  # the folder itself is gone, or is another user's by now
            self._finalizer.detach()
            self._make()


def remove_orphans() -> None:
    """Remove this user's folders whose process has died."""
    parent = _parent()
    for path in (*parent.glob(f"{PREFIX}*"), *parent.glob(f"{UNFINISHED}*")):
        with suppress(OSError):  # another process may remove it too, or it is not such a folder
            folder = open_private(path)
            try:
                _remove_if_orphan(path, folder)
            finally:
                os.close(folder)


def _remove_if_orphan(path: Path, folder: int) -> None:
    lock: IO[str] | None = None
    try:
        lock = _try_lock(folder)
        if lock is None:  # its process lives
            return
    except FileNotFoundError:  # a folder that is being made, or whose making broke off
        age_s = time.time() - os.fstat(folder).st_mtime
        if not path.name.startswith(UNFINISHED) or age_s < STALE_S:
            return
    with suppress(FileNotFoundError), _open_in(folder, _SHARED_MEMORY, "r") as listed:
        for name in listed.read().split():
            (SHARED_MEMORY / Path(name).name).unlink(missing_ok=True)
    for name in sorted(os.listdir(folder), key=_LOCK.__eq__):  # the lock last, if this is killed
        os.unlink(name, dir_fd=folder)
    path.rmdir()
    if lock is not None:
        lock.close()
    logger.info("removed %s, which a process left behind that was killed", path)


def _parent() -> Path:
    """Return the folder for temporary files, or `SHORT_PARENT` if its path is long or missing."""
    parent = Path(tempfile.gettempdir())
    return parent if len(str(parent)) <= MAX_PARENT_CHARS and parent.is_dir() else SHORT_PARENT


@contextmanager
def checked_address(endpoint: str) -> Iterator[str]:
    """Check that an address is a socket in a `SessionFolder` of this user.

    Yields another address of the same socket. In the body, the other address stays that of the same
    socket, whatever becomes of the path.

    Raises:
        SessionError: the address is no such socket.
    """
    path = Path(endpoint.removeprefix("ipc://"))
    try:
        if not endpoint.startswith("ipc:///") or not path.parent.name.startswith(PREFIX):
            raise ValueError("another form of address")
        # Another user may swap a link above the folder at any time, so the folder is kept open. No
        # other user may swap its files.
        folder = open_private(path.parent)
    except (OSError, ValueError) as error:
        raise _not_allowed(endpoint, error) from None
    try:
        try:
            mode = os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode
            if not stat.S_ISSOCK(mode):
                raise ValueError("not a socket")
        except (OSError, ValueError) as error:
            raise _not_allowed(endpoint, error) from None
        yield f"ipc:///proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _not_allowed(endpoint: str, error: Exception) -> SessionError:
    return SessionError(
        f"session endpoint {endpoint[:200]!r}: expected ipc://<folder>/{PREFIX}*/<number>, the "
        f"socket of a trainer's process of this user on this host ({str(error)[:200]})"
    )


def _remove_own(path: Path, owner: int) -> None:
    """Remove the folder, but not in a forked child of its owner."""
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


def open_private(path: Path) -> int:
    """Open a folder that only this user owns and may enter. Return its descriptor.

    Raises:
        OSError: the path is no such folder, but a link, for example.
        ValueError: the path has a null byte.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    status = os.fstat(folder)
    if status.st_mode & 0o077 or status.st_uid != os.geteuid():
        os.close(folder)
        raise PermissionError("another user owns the folder or may enter it")
    return folder


def _is_at(path: Path, file: IO[str]) -> bool:
    """Return True if the path is still that of the open file."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except OSError:
        return False


def _open_in(folder: int, name: str, mode: str) -> IO[str]:
    return open(name, mode, opener=partial(os.open, dir_fd=folder))


def _try_lock(folder: int) -> IO[str] | None:
    """Lock the folder until the file is closed. Return None if a living process holds the lock."""
    # FileNotFoundError if there is no lock. None is made: another process may be removing the
    # folder, and would leave the new file behind.
    file = _open_in(folder, _LOCK, "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
