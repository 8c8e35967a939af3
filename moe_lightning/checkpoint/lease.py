"""Who reads a checkpoint holds a lease on it, and pruning leaves it alone: a shared lock on its manifest, which the
kernel releases when the reader dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from moe_lightning.checkpoint.manifest import MANIFEST


@contextmanager
def lease(directory: Path) -> Generator[None, None, None]:
    """Keeps a checkpoint directory from being pruned while the context is open.

    Raises:
        FileNotFoundError: it is gone, or being deleted.
    """
    path = directory / MANIFEST
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FileNotFoundError(f"{path} is being deleted") from error
        if not os.path.samestat(os.fstat(fd), os.stat(path)):
            raise FileNotFoundError(f"{path} was replaced")
        yield
    finally:
        os.close(fd)


@contextmanager
def unread(directory: Path) -> Generator[bool, None, None]:
    """Whether nobody reads a checkpoint; nobody begins to as long as the context is open and the answer was yes."""
    try:
        fd = os.open(directory / MANIFEST, os.O_RDWR | os.O_CLOEXEC)  # network file systems lock writable files only
    except FileNotFoundError:
        yield True
        return
    try:
        free = False
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        yield free
    finally:
        os.close(fd)
