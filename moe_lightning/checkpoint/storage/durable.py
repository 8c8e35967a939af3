"""Durable writes, locks that end with their holder, and deletion of interrupted saves."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from moe_lightning.errors import CheckpointError

_LOCK_S = 60.0


def lock_exclusively(fd: int, *, timeout_s: float, message: str) -> None:
    """Take the exclusive lock of an open file, but wait no longer than the timeout.

    Raises:
        CheckpointError: `message`, after the timeout.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise CheckpointError(message) from error
            time.sleep(0.0005)
        else:
            return


@contextlib.contextmanager
def directory_lock(root: Path, *, name: str = ".lock") -> Iterator[None]:
    """Hold a lock file in a directory; the kernel releases it when this process dies.

    Raises:
        CheckpointError: another process holds it for longer than the timeout.
    """
    fd = os.open(root / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        message = f"the lock of {root} was not free within {_LOCK_S:g} s"
        lock_exclusively(fd, timeout_s=_LOCK_S, message=message)
        yield
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, on disk when this returns."""
    staged = path.with_name(f".{path.name}.{secrets.token_hex(6)}.new")
    try:
        with open(staged, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(staged, path)
    except OSError:
        staged.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def identity_of(directory: Path) -> str:
    """Device and inode of a directory: the same by whatever path it is reached, another one for a copy.

    Raises:
        OSError: there is none.
    """
    about = os.stat(directory)
    return f"{about.st_dev:x}.{about.st_ino:x}"


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
