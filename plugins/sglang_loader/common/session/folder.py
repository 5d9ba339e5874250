"""The folder in which a trainer's process keeps its sessions' sockets.

A private folder `weight-sync-*` (mode 0700) holds the sockets, a list of the shared memory that the
process handed out, and a file that the process keeps locked for as long as it lives, in whichever
PID namespace. A process that was killed cannot clean up; the next one that makes a folder removes
those that nobody holds the lock of, with the shared memory that they list.

    folder = SessionFolder()               # trainer
    endpoint = folder.new_endpoint()
    folder.record(handle)                  # before it is sent

    check_endpoint(endpoint)               # engine: connect to nothing else
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from sglang_loader.common.session.messages import SessionError
from sglang_loader.common.shared_memory import SHARED_MEMORY, BufferHandle, CpuHandle

logger = logging.getLogger(__name__)

PREFIX = "weight-sync-"
MAX_PARENT_CHARS = 70  # a UNIX socket's path has 107
_LOCK = "owner"
_SHARED_MEMORY = "shared-memory"


class SessionFolder:
    """See the module; removed with this object, or when its process ends."""

    def __init__(self) -> None:
        remove_orphans()
        self._num_sockets = 0
        # Under another name until it is locked: else another process might take it for an orphan.
        made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=_parent()))
        (made / _LOCK).touch()
        self._lock = _try_lock(made)
        self._list = (made / _SHARED_MEMORY).open("a")
        self._listed: set[str] = set()
        self.path = made.rename(made.with_name(made.name.removeprefix(".")))
        self._finalizer = weakref.finalize(self, _remove_own, self.path, os.getpid())

    def new_endpoint(self) -> str:
        """A zmq address that no socket has."""
        self._num_sockets += 1
        return f"ipc://{self.path}/{self._num_sockets}"

    def record(self, handle: BufferHandle) -> None:
        """Note the shared memory of a handle, so that it can be removed if this process cannot."""
        name = handle.name if isinstance(handle, CpuHandle) else handle.counter_file
        if name not in self._listed:  # there may be thousands of handles in each sync
            self._listed.add(name)
            self._list.write(f"{name}\n")
            self._list.flush()


def remove_orphans() -> None:
    """Remove the folders that are ours and that no process owns."""
    for path in _parent().glob(f"{PREFIX}*"):
        with suppress(OSError):  # another process may be at it, or it was never ours
            lock = _try_lock(path) if _is_private(path) else None
            if lock is None:
                continue
            with suppress(FileNotFoundError):  # killed before it made the list
                for name in (path / _SHARED_MEMORY).read_text().split():
                    (SHARED_MEMORY / Path(name).name).unlink(missing_ok=True)
            shutil.rmtree(path)
            lock.close()
            logger.info("removed %s, which a process left behind that was killed", path)


def _parent() -> Path:
    """The folder for temporary files, or one with a shorter path."""
    parent = Path(tempfile.gettempdir())
    return parent if len(str(parent)) <= MAX_PARENT_CHARS else Path("/tmp")


def check_endpoint(endpoint: str) -> None:
    """Refuse an address that is not a socket in such a folder of this user.

    Raises:
        SessionError: it is anything else; an engine must not wait there for an answer.
    """
    path = Path(endpoint.removeprefix("ipc://"))
    with suppress(OSError, ValueError):
        if (
            endpoint.startswith("ipc:///")
            and path.parent.name.startswith(PREFIX)
            and _is_private(path.parent)
            and stat.S_ISSOCK(path.lstat().st_mode)
        ):
            return
    raise SessionError(
        f"session endpoint {endpoint[:200]!r}: expected ipc://<folder>/{PREFIX}*/<number>, the "
        "socket of a trainer's process of this user on this host"
    )


def _remove_own(path: Path, owner: int) -> None:
    """A child that the owner forked leaves the folder alone when it ends."""
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


def _is_private(path: Path) -> bool:
    found = path.lstat()
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    return is_private and found.st_uid == os.geteuid()


def _try_lock(path: Path) -> TextIO | None:
    """The folder's lock, held until it is closed; None if a living process holds it.

    Raises:
        FileNotFoundError: there is none. It is not made here: a folder that another process removes
            at this moment would be left with a new lock in it.
    """
    file = (path / _LOCK).open("r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
