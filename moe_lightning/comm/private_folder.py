"""Where the ranks of one machine meet: a folder that no other user of the machine can enter.

A store behind a port, on the loopback interface too, takes what anybody on the machine writes into it; whoever writes
rank 0's address there becomes rank 0. A file asks who opens it. All folders lie in one of this user's, and a lock that
their maker holds says that a folder is in use: what a killed run left is removed by the next one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from moe_lightning.config import validated
from moe_lightning.errors import ConfigurationError

_POLL_S = 0.01
_RANDOM_LETTERS = 8  # of tempfile's names
_UNLOCKED_S = 60.0
"""A folder that is younger may be one whose maker is about to lock it."""


@validated
class PrivateFolder:
    """A new folder of this user's, 0700, until `close`.

    Args:
        longest: bytes that its path may have, as for a Unix socket in it; None for any.

    Attributes:
        path: of the folder.

    Raises:
        ConfigurationError: the folder of this user's folders belongs to somebody else, or none is short enough.
    """

    def __init__(self, *, longest: int | None = None) -> None:
        parent = users_folder(_parent(longest))
        _sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix="world-", dir=parent))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._announcement: Path | None = None
        self._maker = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def announce(self, meeting: str) -> None:
        """Let the other processes of this user find the folder under this name."""
        self._announcement = _announcement(meeting)
        draft = self.path / "announcement"
        draft.write_text(str(self.path))
        draft.replace(self._announcement)

    def close(self) -> None:
        """Remove the folder; a process that was forked off its maker leaves it alone."""
        if os.getpid() != self._maker or self._lock < 0:
            return
        if self._announcement is not None and _read(self._announcement) == str(self.path):
            self._announcement.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def find_folder(meeting: str, timeout_s: float) -> Path:
    """The folder that a living process of this user announces under this name; waits for it.

    Raises:
        ConfigurationError: there is none in time.
    """
    deadline = time.monotonic() + timeout_s
    announcement = _announcement(meeting)
    while True:
        path = Path(_read(announcement) or "-")
        if path.parent == announcement.parent and _is_held(path):
            return checked_folder(path)
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"rank 0 did not appear on this machine within {timeout_s:g} s ({meeting}): start all ranks with one "
                "launcher and one TMPDIR, or give the number of machines as num_nodes"
            )
        time.sleep(_POLL_S)


def users_folder(parent: Path | None = None) -> Path:
    """The folder of this user's folders, made where it is missing.

    Args:
        parent: where it lies; None for the folder of temporary files, where processes look for each other.

    Raises:
        ConfigurationError: somebody else has made it, or others may enter it.
    """
    path = (parent or Path(tempfile.gettempdir()).absolute()) / f"moe-lightning-{os.geteuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return checked_folder(path)


def _parent(longest: int | None) -> Path | None:
    """A folder of temporary files in which a private folder's path is short enough."""
    if longest is None:
        return None
    for name in (tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR"), "/tmp"):
        example = f"{name}/moe-lightning-{os.geteuid()}/world-{'x' * _RANDOM_LETTERS}"
        if name is not None and len(os.fsencode(example)) <= longest and os.access(name, os.R_OK | os.W_OK | os.X_OK):
            return Path(name)
    raise ConfigurationError(f"no folder for temporary files has a path short enough ({longest} bytes): set TMPDIR")


def checked_folder(path: Path) -> Path:
    """The path, if it is a folder that only this user can enter.

    Raises:
        ConfigurationError: it is not.
    """
    try:
        status = path.lstat()
    except OSError as error:
        raise ConfigurationError(f"the folder {path} cannot be used ({error.strerror}): start the run again") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigurationError(
            f"{path} is no folder that this user alone can enter (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):o}): remove it, or set TMPDIR to a directory of your own"
        )
    return path


def _announcement(meeting: str) -> Path:
    return users_folder() / f"meeting-{hashlib.sha256(meeting.encode()).hexdigest()[:32]}"


def _read(announcement: Path) -> str | None:
    try:
        return announcement.read_text()
    except OSError:
        return None


def _is_held(path: Path) -> bool:
    """Whether the maker of a folder lives."""
    with _opened(path) as descriptor:
        return descriptor is not None and not _locked(descriptor)


def _locked(descriptor: int) -> bool:
    """Take the lock of a folder, if nobody has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _sweep(parent: Path) -> None:
    """Remove what makers that were killed have left."""
    for path in parent.glob("world-*"):
        with _opened(path) as descriptor:
            if descriptor is None or time.time() - os.fstat(descriptor).st_mtime < _UNLOCKED_S:
                continue
            if _locked(descriptor):
                shutil.rmtree(path, ignore_errors=True)
    for announcement in parent.glob("meeting-*"):
        if not Path(_read(announcement) or parent).is_dir():
            announcement.unlink(missing_ok=True)
