"""Files and folders on a machine with other users: bounded reads, files that are replaced whole, private folders.

Only regular files are opened, and their size is compared with a limit before anything is read: a named pipe would
block, a device never end, and a sparse file fill the memory.

The ranks of one machine rendezvous through a file in a private folder. A port, on the loopback interface too, would
accept writes of any user of the machine, and whoever writes rank 0's address there becomes rank 0. All folders lie in
one folder of this user. The process that made a folder holds a lock on it; folders of killed runs have no lock and are
removed by the next run.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import hashlib
import io
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self, TextIO

from moe_lightning.config import validated
from moe_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

MOST_BYTES = 1 << 30
"""Limit of what is read as a whole: manifests, configurations, tables, traces."""

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP)
"""Errors of a file system that never has locks, such as Lustre that is mounted without `-o flock`."""

_MOST_EXTENTS = 1000
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def check_local(key: str, value: object) -> None:
    """
    Raises:
        ConfigurationError: the value of the key is an address: nothing is downloaded.
    """
    if "://" in str(value):
        raise ConfigurationError(
            f"{key}={value} is an address, and nothing is downloaded: download it, and give its path on this machine"
        )


def machine_folder(root: str | os.PathLike[str]) -> Path:
    """Return the folder of a run for files of this machine: the working directory where the run's is in a store."""
    return Path("." if "://" in str(root) else root)


def check_regular(path: str | os.PathLike[str], *, most_bytes: int | None = None) -> int:
    """Return the size of a regular file, links followed, without opening it.

    Raises:
        OSError: it is missing, something else, or larger than `most_bytes`; its `strerror` says which.
    """
    return _checked(os.stat(path), path, most_bytes)


def open_regular(path: str | os.PathLike[str], *, most_bytes: int | None = None, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: see `check_regular`.
    """
    check_regular(path)  # opening a device may already do something
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # of what took the file's place meanwhile
    try:
        _checked(os.fstat(descriptor), path, most_bytes)
        return os.fdopen(descriptor, "rb", buffering)
    except BaseException:
        os.close(descriptor)
        raise


def check_written(path: str | os.PathLike[str]) -> None:
    """Refuse a large file most of which was never written: a download that was cut off, or made to look large.

    Raises:
        OSError: it is missing or no regular file, or holds less than half of its bytes; its `strerror` says which.
    """
    with open_regular(path, buffering=0) as file:
        size, end, written = os.fstat(file.fileno()).st_size, 0, 0
        if size <= MOST_BYTES:
            return
        for _ in range(_MOST_EXTENTS):
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError:  # nothing but a hole up to the end
                break
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            written += end - start
            if written >= size // 2 or end >= size:
                break
        else:
            return
    if written < size // 2:
        raise OSError(errno.EINVAL, f"only {written:,} of its {size:,} bytes were ever written", str(path))


def read_bytes(path: str | os.PathLike[str], *, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: see `check_regular`.
    """
    with open_regular(path, most_bytes=most_bytes) as file:
        return file.read(most_bytes)


def read_text(path: str | os.PathLike[str], *, most_bytes: int = MOST_BYTES) -> str:
    """Return the content of a regular file of UTF-8 text.

    Raises:
        OSError: see `check_regular`.
        ValueError: it is not UTF-8.
    """
    return decoded(read_bytes(path, most_bytes=most_bytes))


def open_text(path: str | os.PathLike[str], *, most_bytes: int = MOST_BYTES) -> TextIO:
    """Open a regular file of UTF-8 text to be read line by line, line ends as they are.

    Raises:
        OSError: see `check_regular`.
    """
    return io.TextIOWrapper(open_regular(path, most_bytes=most_bytes), encoding="utf-8", newline="")


def decoded(data: bytes) -> str:
    """Return UTF-8 text.

    Raises:
        ValueError: it is something else; says where in words of ours.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text: {error.reason} at byte {error.start:,}") from None


def follow_umask(path: Path) -> None:
    """Give a file the mode that the umask gives to new ones, where a library has made it private."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        example = Path(folder, "example")
        example.touch()
        path.chmod(stat.S_IMODE(example.stat().st_mode))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file that takes the place of `path` at the end, and is removed after an error.

    So `path` is there as a whole or as it was, also if several machines write it at once; a link is replaced, not
    followed.
    """
    staged = path.with_name(f".{path.name}.{secrets.token_hex(6)}.new")
    try:
        yield staged
        os.rename(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Write a file of UTF-8 text as `replacing` does."""
    with replacing(path) as staged:
        staged.write_text(text, encoding="utf-8")


def append_rows(path: Path, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Add rows to a CSV, which is made with its folder and begins with its head."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            writer.writerow(head)
        writer.writerows(rows)


def save_safetensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write tensors to a new safetensors file with the mode of the umask."""
    from safetensors.torch import save_file  # imports torch

    save_file(dict(tensors), path, dict(metadata))
    follow_umask(path)


def too_large(path: object, nbytes: int, most_bytes: int) -> OSError:
    """The error for a file that is not read because of its size."""
    return OSError(errno.EFBIG, f"it has {nbytes:,} bytes, and at most {most_bytes:,} are read", str(path))


def _checked(about: os.stat_result, path: str | os.PathLike[str], most_bytes: int | None) -> int:
    if stat.S_ISDIR(about.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(about.st_mode):
        kind = _KINDS.get(stat.S_IFMT(about.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, and only regular files are read", str(path))
    if most_bytes is not None and about.st_size > most_bytes:
        raise too_large(path, about.st_size, most_bytes)
    return about.st_size


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
            f"{path} is not a folder that this user alone can enter (owner {status.st_uid}, mode "
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
    """True if the process that made a folder still lives."""
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
