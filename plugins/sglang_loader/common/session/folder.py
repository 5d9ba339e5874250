"""The private folder in which a trainer's process keeps the sockets of its sessions.

A folder `weight-sync-*` (mode 0700) holds the sockets, a list of the shared memory that the process
has shared, and a file that it keeps locked as long as it lives. A process that was killed cannot
clean up: the next one that makes a folder removes those without a lock, and the shared memory that
they list.

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
        """An unused zmq address in the folder."""
        self._num_sockets += 1
        return f"ipc://{self.path}/{self._num_sockets}"

    def record(self, handle: BufferHandle) -> None:
        """List the shared memory of a handle, which others remove if this process is killed."""
        name = handle.name if isinstance(handle, CpuHandle) else handle.counter_file
        if name not in self._listed:  # there may be thousands of handles in each sync
            self._listed.add(name)
            self._list.write(f"{name}\n")
            self._list.flush()


def remove_orphans() -> None:
    """Remove this user's folders whose process has died."""
    for path in _parent().glob(f"{PREFIX}*"):
        with suppress(OSError):  # another process may remove it too, or it is not such a folder
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
    """Raise SessionError unless the address is a socket in such a folder of this user."""
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
    """Remove the folder, but not in a forked child of its owner."""
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


def _is_private(path: Path) -> bool:
    found = path.lstat()
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    return is_private and found.st_uid == os.geteuid()


def _try_lock(path: Path) -> TextIO | None:
    """The folder's lock, held until it is closed; None if a living process holds it.

    Raises:
        FileNotFoundError: there is none. Making one here could leave it in a folder that another
            process is removing.
    """
    file = (path / _LOCK).open("r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
