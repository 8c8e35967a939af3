"""Who reads a checkpoint holds a lease on it, and pruning leaves it alone: a shared lock on its manifest, which the
kernel releases when the reader dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moe_lightning.checkpoint.manifest import MANIFEST


class Lease:
    """Keeps a checkpoint directory from being pruned until it is released.

    Args:
        directory: the checkpoint.

    Raises:
        FileNotFoundError: it is gone, or being deleted.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / MANIFEST
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._fd), os.stat(path)):
                raise FileNotFoundError(f"{path} was replaced")
        except BlockingIOError as error:
            self.release()
            raise FileNotFoundError(f"{path} is being deleted") from error
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let it be pruned; may be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextmanager
def unread(directory: Path) -> Iterator[bool]:
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
