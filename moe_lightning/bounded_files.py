"""Files that others may have put there: only regular ones are opened, and a size is compared with its limit before
anything is read. A named pipe would block, a device never end, and a sparse file fill the memory.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from typing import BinaryIO, TextIO

MOST_BYTES = 1 << 30
"""Limit of what is read as a whole: manifests, configurations, tables, traces."""

_MOST_EXTENTS = 1000
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


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
