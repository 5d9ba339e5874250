"""Files that only this user can have written, in a folder of this user.

    write_private(folder / "name", data)
    data = read_private(folder / "name")     # None if there is no such file

A file begins with the digest of its contents, so that a file that was cut or changed is found out.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

MAX_BYTES = 1 << 30
"""Limit of a file's size. A larger file is not read."""

_DIGEST_BYTES = hashlib.sha256().digest_size
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class FileRefused(Exception):
    """The reason why a file or its folder is not used. The text names the file or folder."""


def read_private(path: Path) -> bytes | None:
    """Read a file, or return None if there is no such file.

    Raises:
        FileRefused: the file was cut or changed, or somebody else may have written the file or its
            folder.
        OSError: the file cannot be read.
    """
    if not os.path.lexists(path):
        return None
    _require_own_folder(path.parent)
    # A link may lead to a file of somebody else, and a pipe may never end.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:  # removed since
        return None
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise FileRefused(f"{path} is no regular file")
        _require_own(path, state)
        if state.st_size > MAX_BYTES:
            raise FileRefused(f"{path} has {state.st_size} bytes, more than {MAX_BYTES}")
        content = file.read(MAX_BYTES)
    data = content[_DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != content[:_DIGEST_BYTES]:
        raise FileRefused(f"{path} was cut or changed")
    return data


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only this user can read and write. Readers see all of the file, or none.

    Raises:
        FileRefused: somebody else may write to the folder.
        OSError: the file cannot be written.
    """
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    _require_own_folder(path.parent)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(data).digest())
            file.write(data)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise


def keep_newest(folder: Path, num_kept: int) -> None:
    """Remove all files of a folder but the newest ones. Another process may do the same."""
    by_age = []
    for path in folder.iterdir():
        try:
            by_age.append((path.lstat().st_mtime, path))
        except FileNotFoundError:  # another process was first
            continue
    for _, path in sorted(by_age, reverse=True)[num_kept:]:
        path.unlink(missing_ok=True)


def _require_own_folder(folder: Path) -> None:
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode):
        raise FileRefused(f"{folder} is no folder, or a link to one")
    _require_own(folder, state)


def _require_own(path: Path, state: os.stat_result) -> None:
    if state.st_uid != os.geteuid():
        raise FileRefused(f"{path} belongs to user {state.st_uid}, not to {os.geteuid()}")
    if state.st_mode & _OTHERS_MAY_WRITE:
        raise FileRefused(f"other users may write to {path}: its mode is {state.st_mode & 0o777:o}")
